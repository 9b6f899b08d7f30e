"""Kernels of symmetric products, compiled: what they take, need and are made of. No GPU."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gemmsmith.core.kernel import CutlassKernel, EpilogueSchedule, MainloopSchedule, TileScheduler
from gemmsmith.core.operation import Operation
from gemmsmith.runtime.abi import Arguments
from tests.support.compiled import (
    COMPILING,
    INVALID_LAYOUT,
    INVALID_PROBLEM,
    MISALIGNED,
    NOT_SUPPORTED,
    CompiledPacks,
    Loaded,
    arguments_of,
    build,
    kept,
    sass,
    stacks,
)
from tuner.backends import refusal
from tuner.backends.cutlass import footprint
from tuner.backends.cutlass.operation import kernel

pytestmark = [*COMPILING, pytest.mark.long]

SOMEWHERE, ELSEWHERE = 0x10000, 0x20000


def of(
    operation: str, tile: tuple[int, int, int], mainloop: MainloopSchedule, **choices: Any
) -> CutlassKernel:
    return kernel(
        operation=Operation.read(operation),
        tile=tile,
        mainloop=mainloop,
        epilogue=EpilogueSchedule.TMA,
        scheduler=TileScheduler.PERSISTENT,
        alignment=8,
        **choices,
    )


KERNELS = {
    "pingpong": of("bf16.symmetric", (128, 128, 64), MainloopSchedule.PINGPONG, cluster=(2, 1)),
    "narrow": of("bf16.symmetric", (64, 80, 64), MainloopSchedule.PINGPONG),
    "cooperative": of("fp16.symmetric nt", (256, 112, 64), MainloopSchedule.COOPERATIVE),
}
EVERY = pytest.mark.parametrize("name", KERNELS)


@pytest.fixture(scope="module")
def packs() -> CompiledPacks:
    return build(kept(), list(KERNELS.values()), workers=1)


def arguments(name: str, n: int = 512, **extents: int) -> Arguments:
    made = arguments_of(KERNELS[name], m=n, n=n, **extents)
    made.a = made.b = SOMEWHERE
    made.c = made.d = ELSEWHERE
    return made


def status(packs: CompiledPacks, name: str, **changes: Any) -> int:
    """What the kernel says to its arguments after these changes."""
    changed = arguments(name)
    for field, value in changes.items():
        setattr(changed, field, value)
    return Loaded(packs, KERNELS[name]).can_implement(changed)


@EVERY
def test_it_is_what_the_rules_say(packs: CompiledPacks, name: str) -> None:
    assert refusal(KERNELS[name]) is None
    info = Loaded(packs, KERNELS[name]).describe()
    assert info.stages == footprint.stages(KERNELS[name])
    assert info.shared_bytes == footprint.shared_bytes(KERNELS[name])
    assert stacks(packs.pack(KERNELS[name]).path) == {("0", "0")}
    assert Loaded(packs, KERNELS[name]).workspace_bytes(arguments(name)) == 0


@EVERY
def test_a_and_b_are_one_matrix_of_a_square_problem(packs: CompiledPacks, name: str) -> None:
    assert status(packs, name) == status(packs, name, batch=3) == 0
    leading = arguments(name).lda
    for change in (
        {"n": 256},
        {"m": 256},
        {"b": ELSEWHERE},
        {"ldb": leading + 8},
        {"batch": 3, "batch_stride_b": 0},
        {"m": 0, "n": 0},
        {"batch": 0},
        {"batch": 2**31 - 1},
        {"swizzle": 0},
    ):
        assert status(packs, name, **change) == INVALID_PROBLEM, change
    assert status(packs, name, bias=SOMEWHERE) == NOT_SUPPORTED


@EVERY
def test_extents_are_multiples_of_eight(packs: CompiledPacks, name: str) -> None:
    loaded = Loaded(packs, KERNELS[name])
    for n, k in ((8, 8), (16, 8), (1000, 1016), (32768, 64)):
        assert loaded.can_implement(arguments(name, n=n, k=k)) == 0, (n, k)
    assert loaded.can_implement(arguments(name, n=516)) == MISALIGNED


@EVERY
def test_c_is_added_and_rows_may_have_gaps(packs: CompiledPacks, name: str) -> None:
    assert status(packs, name, beta=0.5, c=SOMEWHERE) == 0
    assert status(packs, name, beta=0.5, c=None) == INVALID_PROBLEM
    assert status(packs, name, ldd=520) == 0
    assert status(packs, name, ldd=516) == MISALIGNED
    assert status(packs, name, ldd=504) == INVALID_LAYOUT
    assert status(packs, name, d=ELSEWHERE + 8) == MISALIGNED


@EVERY
def test_a_d_that_is_read_is_not_launched(packs: CompiledPacks, name: str) -> None:
    loaded, made = Loaded(packs, KERNELS[name]), arguments(name)
    made.d = SOMEWHERE
    assert loaded.run(made) == INVALID_PROBLEM
    made = arguments(name)
    made.beta = 1.0
    assert loaded.run(made) == INVALID_PROBLEM


@EVERY
def test_a_part_of_a_tile_is_stored_twice(packs: CompiledPacks, name: str) -> None:
    pack = packs.pack(KERNELS[name])
    body, copies = sass(pack.path), 0
    for member in (each for each in KERNELS.values() if each.name in pack.kernels):
        (m, n, _), (rows, columns) = member.tile, footprint.epilogue_tile(member)
        boxes = rows // 64  # one copy takes 128 bytes of a transposed row
        copies += (m // rows) * (n // columns) * (1 + boxes)
    assert len(re.findall(r"\bUTMASTG", body)) == copies
    assert "STSM.16.MT88" in body
    assert "HGMMA" in body
