"""Packs of kernels with backward epilogues: what they take, what they need, what they are made of.

No GPU.
"""

from __future__ import annotations

from typing import Any

import pytest

from gemmsmith.core.epilogue import Backward
from gemmsmith.core.kernel import MainloopSchedule
from tests.integration.test_compile import (
    INVALID_LAYOUT,
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
    "gelu_bgrad": with_epilogue("fp16.then_dgelu_bgrad", (128, 256, 64), COOPERATIVE, "tt"),
    "silu_gate_act": with_epilogue(
        "bf16.then_dsilu_gate_act", (128, 176, 64), PINGPONG, "tt", cluster=(2, 1)
    ),
    "gelu_gate_act": with_epilogue("bf16.then_dgelu_gate_act", (128, 176, 64), PINGPONG, "tt"),
}
"""All that the header has: a further output, sums of rows, gates; both types and mainloops."""

EVERY = pytest.mark.parametrize("name", KERNELS)
POINTER = 0x1000


@pytest.fixture(scope="module")
def packs() -> CompiledPacks:
    return build(kept(), list(KERNELS.values()))


def parts_of(name: str) -> Backward:
    parts = KERNELS[name].operation.epilogue.backward
    assert parts is not None
    return parts


def arguments(name: str, **extents: int) -> Any:
    """Arguments that the kernel takes; what its epilogue has, at made-up addresses."""
    parts, made = parts_of(name), arguments_of(KERNELS[name], **extents)
    made.aux, made.ld_aux = POINTER, made.n * parts.halves
    made.ldd = made.n * parts.halves
    if parts.activated:
        made.activated, made.ld_activated = POINTER, made.n
    if parts.bias_gradient:
        made.bias_gradient = POINTER
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
def test_no_registers_spill_and_tensor_cores_multiply(packs: CompiledPacks, name: str) -> None:
    path = packs.pack(KERNELS[name]).path
    assert stacks(path) == {("0", "0")}
    assert "HGMMA" in sass(path)


@EVERY
def test_what_the_epilogue_has_must_be_there(packs: CompiledPacks, name: str) -> None:
    loaded, parts = Loaded(packs, KERNELS[name]), parts_of(name)
    assert loaded.can_implement(arguments(name)) == 0
    for field, has in (
        ("aux", True),
        ("activated", parts.activated),
        ("bias_gradient", parts.bias_gradient),
        ("bias", False),
        ("residual", False),
    ):
        given = arguments(name)
        setattr(given, field, None if has else POINTER)
        expected = INVALID_PROBLEM if has else NOT_SUPPORTED
        assert loaded.can_implement(given) == expected, field
        assert loaded.workspace_bytes(given) == -expected


@EVERY
def test_sums_of_tiles_are_the_workspace(packs: CompiledPacks, name: str) -> None:
    loaded, (tile_m, tile_n, _) = Loaded(packs, KERNELS[name]), KERNELS[name].tile
    given = arguments(name, m=1001, n=1016)
    rows, columns = -(-1001 // tile_m), -(-1016 // tile_n) * tile_n
    wanted = -(-rows * columns * 4 // 256) * 256 if parts_of(name).bias_gradient else 0
    assert loaded.workspace_bytes(given) == wanted


@EVERY
def test_nothing_is_read_or_dropped_besides(packs: CompiledPacks, name: str) -> None:
    loaded = Loaded(packs, KERNELS[name])
    for field, value in (("batch", 2), ("beta", 1.0), ("scale_a", POINTER), ("amax", POINTER)):
        given = arguments(name)
        setattr(given, field, value)
        assert loaded.can_implement(given) == NOT_SUPPORTED, field


@EVERY
def test_rows_are_aligned_and_of_any_number(packs: CompiledPacks, name: str) -> None:
    loaded, parts = Loaded(packs, KERNELS[name]), parts_of(name)
    assert loaded.can_implement(arguments(name, m=1)) == 0
    assert loaded.can_implement(arguments(name, m=1001)) == 0
    assert loaded.can_implement(arguments(name, n=516)) == MISALIGNED
    width = 512 * parts.halves
    for field, leading, least in (
        ("aux", "ld_aux", width),
        ("d", "ldd", width),
        ("activated", "ld_activated", 512),
    ):
        if not getattr(arguments(name), field):
            continue
        for change, expected in (
            ({field: POINTER + 2}, MISALIGNED),
            ({leading: least + 4}, MISALIGNED),
            ({leading: least - 8}, INVALID_LAYOUT),
            ({leading: 2 * least}, 0),
        ):
            given = arguments(name)
            for key, value in change.items():
                setattr(given, key, value)
            assert loaded.can_implement(given) == expected, change
    if parts.bias_gradient:
        given = arguments(name)
        given.bias_gradient = POINTER + 2  # it is written element by element
        assert loaded.can_implement(given) == 0
        given.bias_gradient = POINTER + 1
        assert loaded.can_implement(given) == MISALIGNED
