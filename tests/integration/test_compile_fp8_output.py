"""Packs of kernels with an FP8 output: what they take, what they need. No GPU."""

from __future__ import annotations

from typing import Any

import pytest

from gemmsmith.core.kernel import MainloopSchedule
from tests.integration.test_compile import (
    INVALID_PROBLEM,
    MISALIGNED,
    NOT_SUPPORTED,
    sass,
    stacks,
)
from tests.support.compiled import CompiledPacks, Loaded, arguments_of, build, kept, with_epilogue
from tuner.backends import refusal
from tuner.backends.cutlass import footprint

pytestmark = [pytest.mark.compiles, pytest.mark.long, pytest.mark.timeout(1800)]

PINGPONG, COOPERATIVE = MainloopSchedule.PINGPONG, MainloopSchedule.COOPERATIVE


KERNELS = {
    "gelu_swapped": with_epilogue(
        "fp8_e4m3.out_e4m3.then_bias_gelu",
        (64, 64, 128),
        PINGPONG,
        swapped=True,
        fast_accumulation=True,
    ),
    "gate_promoted": with_epilogue(
        "fp8_e4m3.out_e4m3.then_silu_gate", (128, 128, 128), COOPERATIVE, cluster=(2, 1)
    ),
}
"""Both epilogues; gates whose sums are promoted have a mainloop of their own. The other kinds are
compiled for tests/gpu/test_fp8_output.py."""
EVERY = pytest.mark.parametrize("name", KERNELS)
POINTER = 0x1000


@pytest.fixture(scope="module")
def packs() -> CompiledPacks:
    return build(kept(), list(KERNELS.values()))


def arguments(name: str, **extents: int) -> Any:
    """Arguments that the kernel takes; what its epilogue has, at made-up addresses."""
    epilogue = KERNELS[name].operation.epilogue
    made = arguments_of(KERNELS[name], **extents)
    if epilogue.has_bias:
        made.bias = POINTER
    if epilogue.is_gated:
        made.b_up = POINTER
    return made


@EVERY
def test_the_rules_allow_it(name: str) -> None:
    assert refusal(KERNELS[name]) is None


@EVERY
def test_what_is_said_of_shared_memory_is_so(packs: CompiledPacks, name: str) -> None:
    info = Loaded(packs, KERNELS[name]).describe()
    assert info.stages == footprint.stages(KERNELS[name])
    assert 0 <= footprint.shared_bytes(KERNELS[name]) - info.shared_bytes <= 384


@EVERY
def test_no_registers_spill(packs: CompiledPacks, name: str) -> None:
    assert stacks(packs.pack(KERNELS[name]).path) == {("0", "0")}


@EVERY
def test_a_warp_adds_its_largest_value_once(packs: CompiledPacks, name: str) -> None:
    body = sass(packs.pack(KERNELS[name]).path)
    assert "REDUX" in body
    assert "F2FP.SATFINITE.E4M3" in body


@EVERY
def test_factor_and_largest_value_may_be_left_out(packs: CompiledPacks, name: str) -> None:
    loaded = Loaded(packs, KERNELS[name])
    for change in ({}, {"scale_d": POINTER}, {"amax": POINTER}, {"scale_a": POINTER}):
        given = arguments(name)
        for key, value in change.items():
            setattr(given, key, value)
        assert loaded.can_implement(given) == 0, change
        assert loaded.workspace_bytes(given) == 0


@EVERY
def test_nothing_is_read_or_dropped_besides(packs: CompiledPacks, name: str) -> None:
    loaded = Loaded(packs, KERNELS[name])
    for change in ({"batch": 2}, {"beta": 1.0}, {"residual": POINTER}, {"aux": POINTER}):
        given = arguments(name)
        for key, value in change.items():
            setattr(given, key, value)
        assert loaded.can_implement(given) == NOT_SUPPORTED, change
    given = arguments(name)
    for field in ("bias", "b_up"):
        setattr(given, field, None)
    assert loaded.can_implement(given) == INVALID_PROBLEM


@EVERY
def test_rows_are_of_16_bytes_and_of_any_number(packs: CompiledPacks, name: str) -> None:
    loaded = Loaded(packs, KERNELS[name])
    halves = 1 + KERNELS[name].operation.epilogue.is_gated
    for extents in ({"m": 1}, {"m": 1001}, {"n": 16 * halves}, {"n": 1040 * halves}):
        assert loaded.can_implement(arguments(name, **extents)) == 0
    assert loaded.can_implement(arguments(name, n=520 * halves)) == MISALIGNED
    given = arguments(name)
    given.d = POINTER + 8
    assert loaded.can_implement(given) == MISALIGNED
