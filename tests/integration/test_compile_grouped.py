"""Packs of grouped products: what they take, what they need, what they are made of. No GPU."""

from __future__ import annotations

from typing import Any

import pytest

from gemmsmith.core.kernel import EpilogueSchedule, Kernel, MainloopSchedule, TileScheduler
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import MAX_GROUPS
from tests.integration.test_compile import INVALID_PROBLEM, MISALIGNED, NOT_SUPPORTED, sass
from tests.support.compiled import CompiledPacks, Loaded, arguments_of, build, kept
from tuner.backends.cutlass import footprint
from tuner.backends.cutlass.operation import kernel

pytestmark = [pytest.mark.compiles, pytest.mark.long, pytest.mark.timeout(1800)]

PINGPONG, COOPERATIVE = MainloopSchedule.PINGPONG, MainloopSchedule.COOPERATIVE


def of(
    dtype: str,
    layout: str,
    tile: tuple[int, int, int],
    mainloop: MainloopSchedule,
    scheduler: TileScheduler = TileScheduler.PERSISTENT,
    **choices: Any,
) -> Kernel:
    return kernel(
        operation=Operation.of(dtype, layout),
        tile=tile,
        mainloop=mainloop,
        scheduler=scheduler,
        epilogue=EpilogueSchedule.TMA,
        alignment=8,
        **choices,
    )


KERNELS = {
    "rows": of("bf16.group_rows", "tn", (128, 32, 64), PINGPONG, swapped=True),
    "depth": of("bf16.out_f32.group_depth", "nt", (128, 128, 64), COOPERATIVE, cluster=(2, 1)),
    "walked": of(
        "fp16.group_rows", "tn", (128, 16, 64), PINGPONG, TileScheduler.GROUPS, swapped=True
    ),
}
EVERY = pytest.mark.parametrize("name", KERNELS)
GROUPS = 4


@pytest.fixture(scope="module")
def packs() -> CompiledPacks:
    return build(kept(), list(KERNELS.values()))


def arguments(name: str, **extents: int) -> Any:
    """Arguments that the kernel takes; where groups end at a made-up address."""
    made = arguments_of(KERNELS[name], **{"batch": GROUPS, **extents})
    made.offsets = 0x2000
    return made


@EVERY
def test_what_is_said_of_shared_memory_is_so(packs: CompiledPacks, name: str) -> None:
    info = Loaded(packs, KERNELS[name]).describe()
    assert info.stages == footprint.stages(KERNELS[name])
    assert info.shared_bytes == footprint.shared_bytes(KERNELS[name])


@EVERY
def test_a_product_of_groups_needs_to_know_where_they_end(packs: CompiledPacks, name: str) -> None:
    loaded, given = Loaded(packs, KERNELS[name]), arguments(name)
    assert loaded.can_implement(given) == 0
    given.offsets = None
    assert loaded.can_implement(given) == INVALID_PROBLEM
    assert loaded.can_implement(arguments(name, batch=MAX_GROUPS)) == 0
    given = arguments(name)
    given.batch = MAX_GROUPS + 1
    assert loaded.can_implement(given) == INVALID_PROBLEM


@EVERY
def test_only_gradients_are_added_to(packs: CompiledPacks, name: str) -> None:
    loaded, given = Loaded(packs, KERNELS[name]), arguments(name)
    given.beta, given.c, given.ldc = 1.0, given.d, given.ldd
    assert loaded.can_implement(given) == (0 if name == "depth" else NOT_SUPPORTED)
    given.c = 0x9000
    assert loaded.can_implement(given) == NOT_SUPPORTED


@EVERY
def test_any_number_of_tokens_but_aligned_rows(packs: CompiledPacks, name: str) -> None:
    loaded = Loaded(packs, KERNELS[name])
    tokens = "k" if name == "depth" else "m"
    assert loaded.can_implement(arguments(name, **{tokens: 1})) == 0
    assert loaded.can_implement(arguments(name, **{tokens: 1001})) == 0
    assert loaded.can_implement(arguments(name, n=513)) == MISALIGNED


def test_only_pointer_arrays_need_a_workspace(packs: CompiledPacks) -> None:
    """Of shapes, pointers, strides and descriptors; more groups, more of it."""
    sizes = {
        (name, groups): Loaded(packs, KERNELS[name]).workspace_bytes(arguments(name, batch=groups))
        for name in KERNELS
        for groups in (GROUPS, MAX_GROUPS)
    }
    assert sizes["walked", GROUPS] == sizes["walked", MAX_GROUPS] == 0
    for name in ("rows", "depth"):
        assert 0 < sizes[name, GROUPS] < sizes[name, MAX_GROUPS] < 2**20


@pytest.mark.parametrize(
    ("name", "instruction"),
    [
        ("rows", "HGMMA.64x32x16.F32.BF16"),
        ("depth", "HGMMA.64x128x16.F32.BF16"),
        ("walked", "HGMMA.64x16x16.F32"),
        ("walked", "UBLKCP.G.S"),
    ],
)
def test_machine_code_uses_the_tensor_cores_and_bulk_copies(
    packs: CompiledPacks, name: str, instruction: str
) -> None:
    assert instruction in sass(packs.pack(KERNELS[name]).path)
