"""The generated translation unit: CUTLASS's own text, in order, with our adapters around it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cutlass_library.gemm_operation import EmitGemmUniversal3xInstance

from gemmsmith.kernel import Backend, EpilogueSchedule, Kernel, MainloopSchedule, TileScheduler
from gemmsmith.problem import DType, Layout
from tests.support.compiled import PINGPONG, STREAM_K
from tuner.codegen import HEADERS, kernel_digest, unit_source
from tuner.space.operation import kernel, operation

SWAPPED = kernel(
    dtype=DType.BF16,
    layout=Layout.TT,
    tile=(64, 16, 64),
    mainloop=MainloopSchedule.PINGPONG,
    epilogue=EpilogueSchedule.TMA,
    scheduler=TileScheduler.PERSISTENT,
    alignment=8,
    swapped=True,
)
ALIGN_1 = kernel(
    dtype=DType.FP8_E4M3,
    layout=Layout.TN,
    tile=(64, 64, 64),
    stages=2,
    mainloop=MainloopSchedule.MULTISTAGE,
    epilogue=EpilogueSchedule.THREADBLOCK,
    scheduler=TileScheduler.GRID,
    alignment=1,
)


def test_unit_is_deterministic_and_keeps_the_order_it_was_given() -> None:
    source = unit_source([STREAM_K, PINGPONG])
    assert source == unit_source([STREAM_K, PINGPONG])
    table = source[source.index("kernel_table[]") :]
    assert table.index(STREAM_K.name) < table.index(PINGPONG.name)
    assert "kernel_table_size = 2;" in source


def test_kernels_are_defined_by_cutlass_own_text() -> None:
    emitted = EmitGemmUniversal3xInstance().emit(operation(PINGPONG)).strip()
    assert emitted in unit_source([PINGPONG])


@pytest.mark.parametrize("dtype", [DType.FP8_E4M3, DType.FP8_E5M2])
def test_fp8_kernels_get_the_epilogue_with_scales(dtype: DType) -> None:
    tma = kernel(
        dtype=dtype,
        layout=Layout.TN,
        tile=(128, 128, 128),
        mainloop=MainloopSchedule.COOPERATIVE,
        epilogue=EpilogueSchedule.TMA,
        scheduler=TileScheduler.PERSISTENT,
        alignment=16,
        fast_accumulation=True,
    )
    assert "gemmsmith::ScaledLinearCombination<" in unit_source([tma])
    assert "gemmsmith::thread::ScaledLinearCombination<" in unit_source([ALIGN_1])
    assert "ScaledLinearCombination" not in unit_source([PINGPONG])


def test_adapter_is_told_the_problem_s_own_orientation() -> None:
    source = unit_source([SWAPPED])
    assert f"Gemm3x<{SWAPPED.name}, gemmsmith::Traits<true, true, 8, 8, 8>, true>" in source
    assert f"Gemm2x<{ALIGN_1.name}, gemmsmith::Traits<true, false, 1, 1, 1>>" in unit_source(
        [ALIGN_1]
    )


def test_only_the_headers_of_the_backends_in_use_are_included() -> None:
    assert "gemm2x.hpp" not in unit_source([PINGPONG])
    assert "gemm3x.hpp" not in unit_source([ALIGN_1])
    assert ALIGN_1.backend is Backend.CUTLASS2X


@pytest.mark.parametrize("kernels", [[], [PINGPONG, STREAM_K, PINGPONG]])
def test_a_unit_needs_kernels_of_different_names(kernels: list[Kernel]) -> None:
    with pytest.raises(ValueError, match="kernel"):
        unit_source(kernels)


def test_digest_covers_what_the_kernel_compiles_from() -> None:
    assert kernel_digest(PINGPONG) == kernel_digest(replace(PINGPONG))
    variants = [PINGPONG, STREAM_K, SWAPPED, ALIGN_1, replace(PINGPONG, alignment_d=16)]
    assert len({kernel_digest(variant) for variant in variants}) == len(variants)


def test_headers_bring_no_names_of_cute_into_file_scope() -> None:
    for header in HEADERS.rglob("*.h*"):
        assert "using namespace" not in header.read_text(encoding="utf-8"), header
