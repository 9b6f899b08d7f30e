"""Packs of grouped products with a gate: what they take, what they need, what they are made of."""

from __future__ import annotations

from typing import Any

import pytest

from gemmsmith.core.kernel import MainloopSchedule, TileScheduler
from tests.integration.test_compile import (
    INVALID_LAYOUT,
    INVALID_PROBLEM,
    MISALIGNED,
    NOT_SUPPORTED,
    sass,
)
from tests.integration.test_compile_grouped import GROUPS, of
from tests.support.compiled import CompiledPacks, Loaded, arguments_of, build, kept
from tuner.backends.cutlass import footprint

pytestmark = [pytest.mark.compiles, pytest.mark.long, pytest.mark.timeout(1800)]

GATED = "bf16.group_rows.then_silu_gate_aux"
KERNELS = {
    "few": of(
        GATED, "tn", (128, 32, 64), MainloopSchedule.PINGPONG, TileScheduler.GROUPS, swapped=True
    ),
    "many": of(GATED, "tn", (128, 256, 64), MainloopSchedule.COOPERATIVE, TileScheduler.GROUPS),
}
EVERY = pytest.mark.parametrize("name", KERNELS)
BASE = 0x10000


@pytest.fixture(scope="module")
def packs() -> CompiledPacks:
    return build(kept(), list(KERNELS.values()))


def arguments(name: str, **extents: int) -> Any:
    """Arguments that the kernel takes, of N = 512 and K = 1024, at made-up addresses."""
    made = arguments_of(KERNELS[name], **{"batch": GROUPS, **extents})
    made.offsets = made.b = BASE
    made.b_up = BASE + made.n // 2 * made.ldb * 2
    made.aux, made.ld_aux = BASE, made.n
    return made


def with_changes(name: str, **changes: Any) -> Any:
    made = arguments(name)
    for field, value in changes.items():
        setattr(made, field, value)
    return made


@EVERY
def test_what_is_said_of_shared_memory_is_so(packs: CompiledPacks, name: str) -> None:
    info = Loaded(packs, KERNELS[name]).describe()
    assert info.stages == footprint.stages(KERNELS[name])
    assert info.shared_bytes == footprint.shared_bytes(KERNELS[name])


@EVERY
def test_up_and_aux_must_be_there_and_factors_may_be(packs: CompiledPacks, name: str) -> None:
    loaded = Loaded(packs, KERNELS[name])
    for changes, status in (
        ({}, 0),
        ({"row_scale": BASE + 4}, 0),
        ({"row_scale": BASE + 2}, MISALIGNED),
        ({"b_up": None}, INVALID_PROBLEM),
        ({"aux": None}, INVALID_PROBLEM),
        ({"offsets": None}, INVALID_PROBLEM),
        ({"n": 511}, INVALID_PROBLEM),
    ):
        assert loaded.can_implement(with_changes(name, **changes)) == status, changes
    assert loaded.workspace_bytes(arguments(name)) == 0


@EVERY
def test_gate_and_up_lie_where_one_descriptor_reaches_both(packs: CompiledPacks, name: str) -> None:
    loaded = Loaded(packs, KERNELS[name])
    up = arguments(name).b_up
    for changes, status in (
        ({"b_up": up + 16}, 0),
        ({"b_up": up + 8}, MISALIGNED),
        ({"b_up": BASE}, INVALID_LAYOUT),
        ({"b_up": BASE - 16}, INVALID_LAYOUT),
        ({"ld_aux": 1000}, 0),
        ({"ld_aux": 1004}, MISALIGNED),
    ):
        assert loaded.can_implement(with_changes(name, **changes)) == status, changes
    assert loaded.can_implement(arguments(name, n=528)) == 0
    assert loaded.can_implement(arguments(name, n=520)) == MISALIGNED  # D's rows are 260 long


@EVERY
def test_nothing_is_read_or_dropped_besides(packs: CompiledPacks, name: str) -> None:
    loaded = Loaded(packs, KERNELS[name])
    for field in ("amax", "bias", "residual", "scale_a", "column_scale", "activated"):
        assert loaded.can_implement(with_changes(name, **{field: BASE})) == NOT_SUPPORTED, field


@EVERY
def test_machine_code_stores_three_matrices_by_16_bytes(packs: CompiledPacks, name: str) -> None:
    body = sass(packs.pack(KERNELS[name]).path)
    assert f"HGMMA.64x{KERNELS[name].tile[1]}x16.F32.BF16" in body
    assert "UTMALDG.5D" in body  # weights: K, a slab's rows, gate or up, slabs, groups
    assert body.count("STG.E.128") >= 3
