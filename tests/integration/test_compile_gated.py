"""Packs of gated kernels: what they take, what they need, what they are made of. No GPU."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gemmsmith.core.kernel import MainloopSchedule, cutlass
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
    "aux": with_epilogue("bf16.then_silu_gate_aux", (128, 192, 64), PINGPONG, cluster=(2, 1)),
    "fp8": with_epilogue(
        "fp8_e4m3.then_gelu_gate",
        (128, 256, 128),
        COOPERATIVE,
        cluster=(1, 2),
        fast_accumulation=True,
    ),
}
EVERY = pytest.mark.parametrize("name", KERNELS)
POINTER = 0x1000


@pytest.fixture(scope="module")
def packs() -> CompiledPacks:
    return build(kept(), list(KERNELS.values()))


def arguments(name: str, **extents: int) -> Any:
    """Arguments that the kernel takes, at made-up addresses."""
    made = arguments_of(KERNELS[name], **extents)
    made.b_up = POINTER
    if KERNELS[name].operation.epilogue.stores_aux:
        made.aux, made.ld_aux = POINTER, made.n
    return made


@EVERY
def test_the_rules_allow_it(name: str) -> None:
    assert refusal(KERNELS[name]) is None


@EVERY
def test_what_is_said_of_shared_memory_is_so(packs: CompiledPacks, name: str) -> None:
    info = Loaded(packs, KERNELS[name]).describe()
    assert info.stages == footprint.stages(KERNELS[name])
    assert info.shared_bytes == footprint.shared_bytes(KERNELS[name])


@EVERY
def test_no_registers_spill(packs: CompiledPacks, name: str) -> None:
    assert stacks(packs.pack(KERNELS[name]).path) == {("0", "0")}


@EVERY
def test_b_comes_in_two_copies_and_outputs_leave_in_boxes(packs: CompiledPacks, name: str) -> None:
    body = sass(packs.pack(KERNELS[name]).path)
    known = cutlass(KERNELS[name])
    m, n, k = known.tile
    instructions = m // 64 // footprint.consumer_warpgroups(known) * (k // (256 // _bits(known)))
    assert len(re.findall(r"\bUTMALDG", body)) == 3
    assert len(re.findall(r"\b[HQ]GMMA", body)) % instructions == 0
    boxes = m * n // 2 // (64 * footprint.epilogue_tile(known)[1])
    outputs = 3 if known.operation.epilogue.stores_aux else 1
    assert len(re.findall(r"\bUTMASTG", body)) == (
        boxes * outputs // footprint.consumer_warpgroups(known)
    )


def _bits(known: Any) -> int:
    bits: int = known.operation.a.bits
    return bits


@EVERY
def test_up_and_aux_must_be_there(packs: CompiledPacks, name: str) -> None:
    loaded, epilogue = Loaded(packs, KERNELS[name]), KERNELS[name].operation.epilogue
    assert loaded.can_implement(arguments(name)) == 0
    assert loaded.workspace_bytes(arguments(name)) == 0
    for field, has in (("b_up", True), ("aux", epilogue.stores_aux)):
        given = arguments(name)
        setattr(given, field, None if has else POINTER)
        expected = INVALID_PROBLEM if has else NOT_SUPPORTED
        assert loaded.can_implement(given) == expected, field
        assert loaded.workspace_bytes(given) == -expected
    given = arguments(name)
    given.n += 1
    assert loaded.can_implement(given) == INVALID_PROBLEM


@EVERY
def test_nothing_is_read_or_dropped_besides(packs: CompiledPacks, name: str) -> None:
    loaded, scaled = Loaded(packs, KERNELS[name]), KERNELS[name].operation.is_scaled
    for change in (
        {"batch": 2},
        {"beta": 1.0},
        {"amax": POINTER},
        {"bias": POINTER},
        {"residual": POINTER},
    ):
        given = arguments(name)
        for key, value in change.items():
            setattr(given, key, value)
        assert loaded.can_implement(given) == NOT_SUPPORTED, change
    given = arguments(name)
    given.scale_a = given.scale_b = POINTER
    assert loaded.can_implement(given) == (0 if scaled else NOT_SUPPORTED)


@EVERY
def test_rows_are_aligned_and_of_any_number(packs: CompiledPacks, name: str) -> None:
    loaded = Loaded(packs, KERNELS[name])
    for extents in ({"m": 1}, {"m": 1001}, {"n": 16}, {"n": 1040}):
        assert loaded.can_implement(arguments(name, **extents)) == 0
    # Half of N is what D's rows are long, and where up begins in aux's.
    assert loaded.can_implement(arguments(name, n=520)) == MISALIGNED
    for change, expected in (
        ({"b_up": POINTER + 8}, MISALIGNED),
        ({"ldb": 2048}, 0),  # rows of gate and up in turns
        ({"ldd": 1000}, 0),
        ({"ldd": 1004}, MISALIGNED),
    ):
        given = arguments(name)
        for key, value in change.items():
            setattr(given, key, value)
        assert loaded.can_implement(given) == expected, change
