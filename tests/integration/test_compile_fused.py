"""Packs of fused kernels: what they take, what they need, what they are made of. No GPU."""

from __future__ import annotations

from typing import Any

import pytest

from gemmsmith.core.kernel import MainloopSchedule
from tests.integration.test_compile import (
    INVALID_LAYOUT,
    INVALID_PROBLEM,
    MISALIGNED,
    NOT_SUPPORTED,
    stacks,
)
from tests.support.compiled import CompiledPacks, Loaded, arguments_of, build, kept, with_epilogue
from tuner.backends import refusal
from tuner.backends.cutlass import footprint

pytestmark = [pytest.mark.compiles, pytest.mark.long, pytest.mark.timeout(1800)]

PINGPONG, COOPERATIVE = MainloopSchedule.PINGPONG, MainloopSchedule.COOPERATIVE


KERNELS = {
    "gelu_tanh_aux": with_epilogue(
        "bf16.then_bias_gelu_tanh_aux", (128, 192, 64), PINGPONG, "tn", cluster=(2, 1)
    ),
    "gelu_aux_swapped": with_epilogue(
        "bf16.then_bias_gelu_aux", (128, 192, 64), COOPERATIVE, "tn", swapped=True
    ),
    "relu2_fp8": with_epilogue(
        "fp8_e4m3.then_bias_relu2", (128, 256, 128), COOPERATIVE, "tn", fast_accumulation=True
    ),
    "bias_residual": with_epilogue("bf16.then_bias_residual", (128, 256, 64), COOPERATIVE, "tt"),
    "bias_residual_swapped": with_epilogue(
        "fp16.then_bias_residual", (64, 16, 128), PINGPONG, "tn", swapped=True
    ),
    "bias_scale_residual_aux": with_epilogue(
        "bf16.then_bias_scale_residual_aux", (128, 256, 64), COOPERATIVE, "tn", cluster=(2, 1)
    ),
    "row_scale_fp8_swapped": with_epilogue(
        "fp8_e4m3.then_row_scale",
        (128, 32, 128),
        PINGPONG,
        "tn",
        swapped=True,
        fast_accumulation=True,
    ),
}
"""Each part of the headers once, and once of swapped operands; tests/gpu compile every epilogue."""
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
    if epilogue.has_residual:
        made.residual, made.ld_residual = POINTER, made.n
    if epilogue.stores_aux:
        made.aux, made.ld_aux = POINTER, made.n
    if epilogue.has_column_scale:
        made.column_scale = POINTER
    if epilogue.has_row_scale:
        made.row_scale = POINTER
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
def test_what_the_epilogue_has_must_be_there(packs: CompiledPacks, name: str) -> None:
    loaded, epilogue = Loaded(packs, KERNELS[name]), KERNELS[name].operation.epilogue
    assert loaded.can_implement(arguments(name)) == 0
    assert loaded.workspace_bytes(arguments(name)) == 0
    for field, has in (
        ("bias", epilogue.has_bias),
        ("residual", epilogue.has_residual),
        ("aux", epilogue.stores_aux),
        ("column_scale", epilogue.has_column_scale),
        ("row_scale", epilogue.has_row_scale),
    ):
        given = arguments(name)
        setattr(given, field, None if has else POINTER)
        expected = INVALID_PROBLEM if has else NOT_SUPPORTED
        assert loaded.can_implement(given) == expected, field
        assert loaded.workspace_bytes(given) == -expected


@EVERY
def test_nothing_is_read_or_dropped_besides(packs: CompiledPacks, name: str) -> None:
    loaded, scaled = Loaded(packs, KERNELS[name]), KERNELS[name].operation.is_scaled
    given = arguments(name)
    given.batch = 2
    assert loaded.can_implement(given) == NOT_SUPPORTED
    given = arguments(name)
    given.beta = 1.0
    assert loaded.can_implement(given) == NOT_SUPPORTED
    given = arguments(name)
    given.scale_a = given.scale_b = POINTER
    assert loaded.can_implement(given) == (0 if scaled else NOT_SUPPORTED)
    given = arguments(name)
    given.amax = POINTER
    assert loaded.can_implement(given) == NOT_SUPPORTED


@EVERY
def test_rows_are_aligned_and_of_any_number(packs: CompiledPacks, name: str) -> None:
    loaded, epilogue = Loaded(packs, KERNELS[name]), KERNELS[name].operation.epilogue
    assert loaded.can_implement(arguments(name, m=1)) == 0
    assert loaded.can_implement(arguments(name, m=1001)) == 0
    assert loaded.can_implement(arguments(name, n=513)) == MISALIGNED
    for field in ("aux", "residual"):
        if not getattr(arguments(name), field):
            continue
        for change, expected in (
            ({field: POINTER + 2}, MISALIGNED),
            ({f"ld_{field}": 516}, MISALIGNED),
            ({f"ld_{field}": 504}, INVALID_LAYOUT),
            ({f"ld_{field}": 1024}, 0),
        ):
            given = arguments(name)
            for key, value in change.items():
                setattr(given, key, value)
            assert loaded.can_implement(given) == expected, change
    for field, has, size in (
        ("bias", epilogue.has_bias, 2),
        ("column_scale", epilogue.has_column_scale, 2),
        ("row_scale", epilogue.has_row_scale, 4),
    ):
        if has:
            given = arguments(name)
            setattr(given, field, POINTER + size)  # it is read element by element
            assert loaded.can_implement(given) == 0
            setattr(given, field, POINTER + size // 2)
            assert loaded.can_implement(given) == MISALIGNED
