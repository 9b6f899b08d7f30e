"""Packs of the operations beside the plain float ones: what they take, what they are made of."""

from __future__ import annotations

from typing import Any

import pytest

from gemmsmith.core.kernel import EpilogueSchedule, Kernel, MainloopSchedule, TileScheduler
from gemmsmith.core.operation import Operation
from tests.integration.test_compile import INVALID_PROBLEM, MISALIGNED, NOT_SUPPORTED, sass
from tests.support.compiled import CompiledPacks, Loaded, arguments_of, build, kept
from tuner.backends.cutlass import footprint
from tuner.backends.cutlass.operation import kernel

pytestmark = [pytest.mark.compiles, pytest.mark.long, pytest.mark.timeout(1800)]

WS, PINGPONG, COOPERATIVE = (
    MainloopSchedule.WARP_SPECIALIZED,
    MainloopSchedule.PINGPONG,
    MainloopSchedule.COOPERATIVE,
)
SCALE_ROW = "int8.out_bf16.scale_row"
FP8_ROWS = "fp8_e4m3.scale_row"


def of(
    dtype: str,
    tile: tuple[int, int, int],
    mainloop: MainloopSchedule,
    scheduler: TileScheduler = TileScheduler.PERSISTENT,
    layout: str = "tn",
    **choices: Any,
) -> Kernel:
    operation = Operation.of(dtype, layout)
    in_cluster = scheduler is TileScheduler.CLUSTER_SPLIT_K
    return kernel(
        operation=operation,
        tile=tile,
        mainloop=mainloop,
        scheduler=scheduler,
        **{
            "epilogue": EpilogueSchedule.NO_SMEM if in_cluster else EpilogueSchedule.TMA,
            "alignment": 16 // operation.a.bytes,
            **choices,
        },
    )


OUT_F32 = of("bf16.out_f32", (128, 128, 64), PINGPONG, layout="nt")
OUT_F32_SPLIT_K = of("bf16.out_f32", (64, 128, 64), PINGPONG, TileScheduler.SPLIT_K, layout="nt")
INT8 = of("int8", (128, 128, 128), PINGPONG)
INT8_ANY = of(
    "int8.out_bf16", (64, 64, 128), PINGPONG, epilogue=EpilogueSchedule.NO_SMEM, alignment=1
)
KERNELS = {
    "out_f32": OUT_F32,
    "out_f32_split_k": OUT_F32_SPLIT_K,
    "out_f32_cluster_split_k": of(
        "bf16.out_f32", (64, 64, 128), WS, TileScheduler.CLUSTER_SPLIT_K, layout="nt"
    ),
    "int8": INT8,
    "int8_out_bf16": of("int8.out_bf16", (64, 32, 256), WS, TileScheduler.GRID, swapped=True),
    "int8_any": INT8_ANY,
    "scale_row": of(SCALE_ROW, (128, 128, 128), COOPERATIVE),
    "scale_row_split_k": of(SCALE_ROW, (128, 128, 128), WS, TileScheduler.SPLIT_K),
    "scale_row_cluster_split_k": of(
        SCALE_ROW, (64, 16, 256), WS, TileScheduler.CLUSTER_SPLIT_K, swapped=True
    ),
    "scale_row_fp8": of(FP8_ROWS, (128, 128, 128), COOPERATIVE),
    "tf32": of("tf32", (128, 128, 32), COOPERATIVE),
}
EVERY = pytest.mark.parametrize("name", KERNELS)


@pytest.fixture(scope="module")
def packs() -> CompiledPacks:
    return build(kept(), list(KERNELS.values()))


def arguments(name: str, **extents: int) -> Any:
    """Arguments that the kernel takes; factors per row at made-up addresses."""
    made = arguments_of(KERNELS[name], **extents)
    if name.startswith("scale_row"):
        made.scaling, made.scale_a, made.scale_b = 1, 0x1004, 0x1008
        made.batch_stride_scale_a, made.batch_stride_scale_b = made.m, made.n
    return made


@EVERY
def test_what_is_said_of_shared_memory_is_so(packs: CompiledPacks, name: str) -> None:
    info, member = Loaded(packs, KERNELS[name]).describe(), KERNELS[name]
    assert info.stages == footprint.stages(member)
    unused = footprint.shared_bytes(member) - info.shared_bytes
    assert 0 <= unused <= (384 if member is INT8_ANY else 0)


@EVERY
def test_products_and_their_sums_with_c_are_taken(packs: CompiledPacks, name: str) -> None:
    loaded, given = Loaded(packs, KERNELS[name]), arguments(name)
    assert loaded.can_implement(given) == 0
    given.beta, given.c = 1.0, 0x1000
    assert loaded.can_implement(given) == 0
    given.c = None
    assert loaded.can_implement(given) == INVALID_PROBLEM


@EVERY
def test_factors_are_taken_by_the_operation_that_has_them(packs: CompiledPacks, name: str) -> None:
    loaded, given = Loaded(packs, KERNELS[name]), arguments(name)
    scaled = name.startswith("scale_row")
    given.scaling, given.scale_a, given.scale_b = 1, 0x1004, 0x1008
    assert loaded.can_implement(given) == (0 if scaled else NOT_SUPPORTED)
    given.scale_b = None
    assert loaded.can_implement(given) == (INVALID_PROBLEM if scaled else NOT_SUPPORTED)
    given.scaling, given.scale_b = 0, 0x1008
    assert loaded.can_implement(given) == NOT_SUPPORTED


def test_integers_take_whole_alpha_and_beta_only(packs: CompiledPacks) -> None:
    loaded, given = Loaded(packs, INT8), arguments("int8")
    given.alpha, given.beta, given.c = -3.0, 2.0, 0x1000
    assert loaded.can_implement(given) == 0
    given.alpha = 0.5
    assert loaded.can_implement(given) == NOT_SUPPORTED
    given.alpha, given.beta = 1.0, 1e10
    assert loaded.can_implement(given) == NOT_SUPPORTED
    fraction = arguments("int8_out_bf16")
    fraction.alpha = 0.5
    assert Loaded(packs, KERNELS["int8_out_bf16"]).can_implement(fraction) == 0


def test_rows_of_fp32_are_aligned_in_fours(packs: CompiledPacks) -> None:
    for name in ("out_f32", "out_f32_split_k", "int8"):
        loaded = Loaded(packs, KERNELS[name])
        assert loaded.can_implement(arguments(name, n=520)) == 0
        given = arguments(name)
        given.ldd = 514
        assert loaded.can_implement(given) == MISALIGNED
    assert Loaded(packs, INT8_ANY).can_implement(arguments("int8_any", n=513, k=1001)) == 0


@pytest.mark.parametrize(
    ("name", "instruction"),
    [
        ("out_f32", "HGMMA.64x128x16.F32.BF16"),
        ("int8", "IGMMA.64x128x32.S8.S8"),
        ("scale_row", "IGMMA.64x128x32.S8.S8"),
        ("scale_row_cluster_split_k", "IGMMA.64x16x32.S8.S8"),
        ("scale_row_fp8", "QGMMA.64x128x32.F32.E4M3.E4M3"),
        ("tf32", "HGMMA.64x128x8.F32.TF32"),
    ],
)
def test_machine_code_uses_the_tensor_cores(
    packs: CompiledPacks, name: str, instruction: str
) -> None:
    assert instruction in sass(packs.pack(KERNELS[name]).path)
