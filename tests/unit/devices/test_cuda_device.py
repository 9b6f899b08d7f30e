"""Blame, restart and isolation in the parent, against a child that misbehaves on cue."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gemmsmith.core.problem import Problem
from tests.support.processes import until
from tuner.devices.base import Contender
from tuner.devices.supervisor import Supervisor
from tuner.errors import DeviceError, DoesNotFit, NoGpu, ReferenceBroken
from tuner.measure.gpu_lock import gpu_lock, lock_path
from tuner.measure.policy import Policy
from tuner.trial import FailureKind, Phase

from .conftest import PROBLEM, DeviceFactory, candidate, contenders
from .fake_child import CUBLAS, ENVIRONMENT, MODEL

QUICK = Policy(screen_samples=3, final_rounds=5, candidate_timeout_s=1.0)


def test_every_contender_gives_one_trial_in_order(fake_device: DeviceFactory) -> None:
    with fake_device() as device:
        trials = list(device.screen(PROBLEM, contenders("a", "wrong", "c"), QUICK))
    assert [t.candidate.kernel.name for t in trials] == ["a", "wrong", "c"]
    first, second, third = trials
    assert first.statistics is not None
    assert first.statistics.median_us == 74.0
    assert first.samples_us == (74.0,) * 3
    assert (first.phase, first.device, first.environment) == (Phase.SCREEN, MODEL, ENVIRONMENT)
    assert first.correctness is not None
    assert not first.replayed
    assert second.failure is not None
    assert second.failure.kind is FailureKind.WRONG
    assert third.measured


@pytest.mark.parametrize(
    ("culprit", "kind", "said"),
    [
        ("crash", FailureKind.CRASHED, "SIGABRT.*something terrible"),
        ("dead", FailureKind.CRASHED, "ILLEGAL_ADDRESS"),
        ("hang", FailureKind.HUNG, "no progress within 1 s"),
        ("garbage", FailureKind.CRASHED, "printf debugging"),
    ],
)
def test_losing_the_child_costs_the_culprit_only(
    fake_device: DeviceFactory, culprit: str, kind: FailureKind, said: str
) -> None:
    with fake_device() as device:
        trials = list(device.screen(PROBLEM, contenders("a", culprit, "c"), QUICK))
        assert [t.candidate.kernel.name for t in trials] == ["a", culprit, "c"]
        failure = trials[1].failure
        assert failure is not None
        assert failure.kind is kind
        assert re.search(said, failure.message, re.DOTALL)
        assert trials[0].measured
        assert trials[2].measured
        again = list(device.screen(PROBLEM, contenders("d"), QUICK))
        assert again[0].measured


def test_all_lost_still_ends(fake_device: DeviceFactory) -> None:
    with fake_device() as device:
        trials = list(device.screen(PROBLEM, contenders("crash1", "crash2", "crash3"), QUICK))
    assert [t.failure.kind for t in trials if t.failure] == [FailureKind.CRASHED] * 3


@pytest.mark.parametrize("culprit", ["crash", "hang", "slow-rounds"])
def test_finals_go_on_without_the_culprit(fake_device: DeviceFactory, culprit: str) -> None:
    with fake_device() as device:
        finals = device.finals(PROBLEM, contenders("a", culprit, "wrong", "d"), QUICK)
    assert [c.kernel.name for c in finals.candidates] == ["a", "d"]
    assert {c.kernel.name for c, _ in finals.failures} == {culprit, "wrong"}
    assert [len(samples) for samples in finals.samples_us] == [5, 5]
    assert finals.samples_us[1][0] == 10.0 + 256
    assert len(finals.baseline_us) == 5
    assert len(finals.correctness) == len(finals.workspace_bytes) == 2


def test_a_contender_without_a_pack_fails_alone(fake_device: DeviceFactory) -> None:
    packless = Contender(candidate=candidate("x"))
    with fake_device() as device:
        trials = list(device.screen(PROBLEM, [packless, *contenders("a")], QUICK))
        finals = device.finals(PROBLEM, [packless, *contenders("a")], QUICK)
    assert trials[0].failure is not None
    assert trials[0].failure.kind is FailureKind.COMPILE
    assert trials[1].measured
    assert [c.kernel.name for c in finals.candidates] == ["a"]
    assert len(finals.failures) == 1


def test_a_refused_request_is_the_error_it_names(fake_device: DeviceFactory) -> None:
    with fake_device() as device:
        with pytest.raises(ReferenceBroken, match="not finite"):
            list(device.screen(PROBLEM, contenders("refuse"), QUICK))
        assert next(iter(device.screen(PROBLEM, contenders("a"), QUICK))).measured


def test_what_does_not_fit_never_reaches_the_child(fake_device: DeviceFactory) -> None:
    huge = Problem(m=2**20, n=2**20, k=64)
    with fake_device() as device:
        with pytest.raises(DoesNotFit):
            list(device.screen(huge, contenders("a"), QUICK))
        with pytest.raises(DoesNotFit):
            device.finals(huge, contenders("a"), QUICK)


def test_a_child_lost_again_and_again_without_a_culprit_is_an_error(
    fake_device: DeviceFactory,
) -> None:
    with fake_device() as device, pytest.raises(DeviceError, match="3 times with no candidate"):
        list(device.screen(PROBLEM, contenders("lost-setup"), QUICK))


def test_a_child_that_does_not_start_says_why(
    fake_device: DeviceFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CHILD_STILLBORN", "1")
    with fake_device() as device, pytest.raises(DeviceError, match="cannot import torch"):
        _ = device.environment
    monkeypatch.setenv("FAKE_CHILD_NO_GPU", "1")
    with fake_device() as device, pytest.raises(NoGpu, match="no CUDA device"):
        _ = device.environment


def test_leaving_a_batch_early_stops_its_work(fake_device: DeviceFactory, tmp_path: Path) -> None:
    with fake_device() as device:
        batch = device.screen(PROBLEM, contenders("a", "hang", "c"), QUICK)
        assert next(batch).measured
        began = time.monotonic()
        batch.close()  # type: ignore[attr-defined]
        assert next(iter(device.screen(PROBLEM, contenders("d"), QUICK))).measured
        assert time.monotonic() - began < 10


def test_the_best_time_so_far_reaches_later_batches(
    fake_device: DeviceFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("FAKE_CHILD_LOG", str(log))
    with fake_device() as device:
        list(device.screen(PROBLEM, contenders("a"), QUICK))
        list(device.screen(PROBLEM, contenders("b"), QUICK))
        list(device.screen(Problem(m=1, n=1, k=1), contenders("b"), QUICK))
    screens = [line for line in log.read_text().splitlines() if '"screen"' in line]
    assert '"best_us":null' in screens[0]
    assert '"best_us":74.0' in screens[1]
    assert '"best_us":null' in screens[2]


def test_the_gpu_is_locked_while_a_batch_runs_and_free_between_batches(
    fake_device: DeviceFactory, tmp_path: Path
) -> None:
    probe = (
        "import fcntl,sys; f=open(sys.argv[1]);\n"
        "try: fcntl.flock(f, fcntl.LOCK_EX|fcntl.LOCK_NB)\n"
        "except BlockingIOError: sys.exit(3)\n"
    )
    path = lock_path("GPU-fake", tmp_path)

    def status() -> int:
        return subprocess.run([sys.executable, "-c", probe, str(path)]).returncode

    with fake_device() as device:
        batch = device.screen(PROBLEM, contenders("a", "b"), QUICK)
        next(batch)
        assert status() == 3
        list(batch)
        assert status() == 0


def test_a_lock_waits_for_its_holder(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys,time,pathlib\nfrom tuner.measure.gpu_lock import gpu_lock, lock_path\n"
            f"with gpu_lock('GPU-x', pathlib.Path({str(tmp_path)!r})):\n"
            " print('held', flush=True); time.sleep(0.5)",
        ],
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    began = time.monotonic()
    with gpu_lock("GPU-x", tmp_path):
        assert time.monotonic() - began > 0.2
    holder.stdout.close()
    assert holder.wait() == 0


def test_sweep_records_everything(fake_device: DeviceFactory) -> None:
    with fake_device() as device:
        recorded = device.sweep(
            PROBLEM, contenders("a", "crash", "c", "wrong"), QUICK, rounds=7, best=1
        )
    by_name = {t.candidate.kernel.name: t for t in recorded.trials}
    assert set(by_name) == {"a", "crash", "c", "wrong"}
    assert len(by_name["a"].common_us) == 7
    assert len(by_name["a"].further_us) == 5
    assert by_name["c"].further_us == ()
    assert by_name["crash"].failure is not None
    assert len(recorded.baseline_common_us) == 7
    assert len(recorded.baseline_further_us) == 5
    assert recorded.discarded_rounds == 1
    assert recorded.baseline_kernels == CUBLAS


def requests(log: Path, kind: str) -> int:
    return sum(f'"type":"{kind}"' in line for line in log.read_text().splitlines())


def test_cublas_is_profiled_in_a_process_that_times_nothing(
    fake_device: DeviceFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("FAKE_CHILD_LOG", str(log))
    with fake_device() as device:
        assert device.baseline_kernels(PROBLEM) == CUBLAS
        assert all(t.measured for t in device.screen(PROBLEM, contenders("a"), QUICK))
        assert device.baseline_kernels(Problem(m=1, n=1, k=1)) == CUBLAS
    assert (requests(log, "hello"), requests(log, "profile")) == (2, 2)
    with device:
        assert device.baseline_kernels(PROBLEM) == CUBLAS
    assert requests(log, "quit") == 3


@pytest.mark.parametrize(
    ("trouble", "asked"),
    [("hang", 1), ("crash", 1), ("refuse", 2)],
)
def test_a_profiler_in_trouble_costs_the_hint_only(
    fake_device: DeviceFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    trouble: str,
    asked: int,
) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("FAKE_CHILD_LOG", str(log))
    monkeypatch.setenv("FAKE_CHILD_PROFILE", trouble)
    with fake_device(setup_timeout_s=3.0) as device, caplog.at_level(logging.WARNING):
        assert device.baseline_kernels(PROBLEM) == ()
        assert str(PROBLEM) in caplog.text
        assert device.baseline_kernels(PROBLEM) == ()
        assert requests(log, "profile") == asked
        assert next(iter(device.screen(PROBLEM, contenders("a"), QUICK))).measured


def test_a_problem_that_does_not_fit_is_not_profiled(fake_device: DeviceFactory) -> None:
    with fake_device() as device:
        assert device.baseline_kernels(Problem(m=2**20, n=2**20, k=64)) == ()
        assert device.baseline_kernels(PROBLEM) == CUBLAS


def test_no_child_no_names(fake_device: DeviceFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CHILD_STILLBORN", "1")
    with fake_device() as device:
        assert device.baseline_kernels(PROBLEM) == ()


WAITING = """
import pathlib, sys
pathlib.Path(sys.argv[1]).write_text("started")
pathlib.Path(sys.argv[1]).write_text(sys.stdin.readline())
"""


def test_a_warm_child_opens_the_gpu_only_when_the_device_is_entered(tmp_path: Path) -> None:
    heard = tmp_path / "heard"
    supervisor = Supervisor(0, (sys.executable, "-c", WAITING, str(heard)), 30.0)
    supervisor.warm()
    until(lambda: heard.exists() and heard.read_text() == "started", "it does not start")
    supervisor.warm()
    supervisor.start()
    until(lambda: "hello" in heard.read_text(), "it is not greeted")
    supervisor.close()


def test_a_warm_child_that_ended_is_replaced(fake_device: DeviceFactory) -> None:
    device = fake_device()
    device.warm()
    child = device._supervisor._starting
    assert child is not None
    child._process.kill()
    child._process.wait()
    with device:
        assert device.environment.gpu_uuid
    device.warm()
    device.close()
    with device:
        assert device.environment.gpu_uuid


def test_the_real_child_says_when_there_is_no_gpu(tmp_path: Path) -> None:
    from tuner.devices import local_gpu
    from tuner.devices.cuda import CudaDevice

    if local_gpu() is not None:
        pytest.skip("this machine has a GPU")
    with pytest.raises(NoGpu, match="gemmsmith doctor"):
        CudaDevice()
    with (
        CudaDevice(model=MODEL, uuid="GPU-none", locks=tmp_path) as device,
        pytest.raises(NoGpu, match="no CUDA device 0"),
    ):
        _ = device.environment
