"""Kernels that hang, crash or lie: each costs its own trial and nothing else."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from gemmsmith.core.problem import Problem
from tests.gpu.conftest import Misbehaving
from tests.support.replacing import replace
from tuner.devices.cuda import CudaDevice
from tuner.errors import DoesNotFit
from tuner.measure.policy import Policy
from tuner.trial import FailureKind

SMALL = Problem(m=96, n=200, k=160)
IMPATIENT = Policy(screen_samples=3, final_rounds=5, candidate_timeout_s=4.0)

EXPECTED = {
    "hang": FailureKind.HUNG,
    "hang_later": FailureKind.HUNG,
    "illegal_address": FailureKind.CRASHED,
    "abort": FailureKind.CRASHED,
    "unwritten": FailureKind.UNTOUCHED,
    "wrong": FailureKind.WRONG,
    "not_a_number": FailureKind.NON_FINITE,
    "unrepeatable": FailureKind.NOT_REPEATABLE,
    "bad_launch": FailureKind.LAUNCH,
    "refuses": FailureKind.REFUSED,
}


@pytest.mark.parametrize("behaviour", EXPECTED)
def test_misbehaviour_is_named_and_contained(
    behaviour: str, device: CudaDevice, misbehaving: Misbehaving
) -> None:
    trials = list(device.screen(SMALL, misbehaving("good", behaviour, "good"), IMPATIENT))
    before, culprit, after = trials
    assert before.measured, before.failure
    assert culprit.failure is not None
    assert culprit.failure.kind is EXPECTED[behaviour], culprit.failure
    assert after.measured, after.failure


def test_a_hang_in_the_rounds_costs_that_finalist_only(
    device: CudaDevice, misbehaving: Misbehaving
) -> None:
    device.close()  # a new child has launched nothing yet: verification passes, the rounds hang
    began = time.monotonic()
    finals = device.finals(SMALL, misbehaving("good", "hang_later"), IMPATIENT)
    assert [c.kernel.name for c in finals.candidates] == ["good"]
    assert [(c.kernel.name, f.kind) for c, f in finals.failures] == [
        ("hang_later", FailureKind.HUNG)
    ]
    assert len(finals.samples_us[0]) == len(finals.baseline_us) == 5
    assert time.monotonic() - began < 120


def test_finals_survive_a_crash(device: CudaDevice, misbehaving: Misbehaving) -> None:
    finals = device.finals(SMALL, misbehaving("illegal_address", "good", "wrong"), IMPATIENT)
    assert [c.kernel.name for c in finals.candidates] == ["good"]
    kinds = {c.kernel.name: f.kind for c, f in finals.failures}
    assert kinds == {"illegal_address": FailureKind.CRASHED, "wrong": FailureKind.WRONG}


def test_a_pack_that_is_no_pack_fails_alone(
    device: CudaDevice, misbehaving: Misbehaving, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(misbehaving.pack.read_bytes()[:10_000])
    good, bad = misbehaving("good", "good")
    trials = list(device.screen(SMALL, [replace(bad, pack=broken), good], IMPATIENT))
    assert trials[0].failure is not None
    assert trials[0].failure.kind is FailureKind.REFUSED
    assert "truncated" in trials[0].failure.message
    assert trials[1].measured


def test_a_problem_that_does_not_fit_is_refused_at_once(
    device: CudaDevice, misbehaving: Misbehaving
) -> None:
    with pytest.raises(DoesNotFit):
        list(device.screen(Problem(m=2**20, n=2**20, k=8), misbehaving("good"), IMPATIENT))
