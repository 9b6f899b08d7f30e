"""Operations beside the plain float ones: which have kernels, of what types and what names."""

from __future__ import annotations

import pytest
from cutlass_library.library import DataType

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import Backend, EpilogueSchedule, TileScheduler, cutlass
from gemmsmith.core.operation import Element, Layout, Scaling
from gemmsmith.core.problem import Problem
from tuner.backends import candidates, kernels, offered, refusal
from tuner.backends.cutlass.operation import gemm_operation
from tuner.backends.cutlass.slim import slim_headers
from tuner.errors import NoLegalCandidate
from tuner.search.predict import predict


def problem(dtype: str, layout: str = "tn", m: int = 512, n: int = 1024, k: int = 2048) -> Problem:
    return Problem(m=m, n=n, k=k, dtype=dtype, layout=layout)


@pytest.mark.parametrize("dtype", ["bf16.out_f32", "fp16.out_f32"])
@pytest.mark.parametrize("layout", ["nt", "tn", "tt", "nn"])
def test_adding_to_d_takes_the_kernels_that_do_not(
    dtype: str, layout: str, h200: DeviceModel
) -> None:
    plain, adding = problem(dtype, layout), problem(f"{dtype}.accumulate", layout)
    assert kernels(adding) == kernels(plain)
    assert offered(adding, h200) == offered(plain, h200)
    assert candidates(adding, h200) == candidates(plain, h200)
    for kernel in offered(adding, h200):
        assert kernel.dtype == dtype
        assert refusal(kernel, adding) is None


def test_kernels_that_add_slices_are_told_apart_by_d() -> None:
    names = [
        {
            kernel.name
            for kernel in kernels(problem(dtype))
            if cutlass(kernel).scheduler is TileScheduler.SPLIT_K
        }
        for dtype in ("bf16", "bf16.out_f32")
    ]
    assert all(names)
    assert names[0].isdisjoint(names[1])


ODD_N = (4096, 4095, 4096)
"""Rows of D that TMA cannot store, of so many tiles that K is not split."""


ROWS = ("int8.out_bf16.scale_row", "fp8_e4m3.scale_row", "fp8_e5m2.scale_row")


@pytest.mark.parametrize("dtype", ["int8", "int8.out_bf16", "tf32", *ROWS])
def test_kernels_are_of_the_operation_and_pass_the_rules(dtype: str) -> None:
    for m, n, k in ((4096, 4096, 4096), (16, 7168, 2048), (33, 4097, 4099), (1, 1, 1)):
        asked = problem(dtype, m=m, n=n, k=k)
        try:
            listed = kernels(asked)
        except NoLegalCandidate:
            assert dtype in ROWS
            assert n % 8
            continue
        assert len({kernel.name for kernel in listed}) == len(listed)
        for kernel in listed:
            assert kernel.dtype == dtype
            assert kernel.layout is Layout.TN
            assert refusal(kernel, asked) is None
            assert kernel.name.endswith("_scale_row") is (kernel.operation.scaling is Scaling.ROW)


@pytest.mark.parametrize("dtype", ["int8", "int8.out_bf16", "int8.out_bf16.scale_row"])
def test_integers_are_summed_in_integers_and_stored_in_them_exactly(dtype: str) -> None:
    for kernel in kernels(problem(dtype)):
        made = gemm_operation(cutlass(kernel))
        sums = made.tile_description.math_instruction.element_accumulator
        assert sums is DataType.s32
        if kernel.backend is Backend.CUTLASS3X:  # the others' epilogues are ours
            exact = made.D.element is DataType.s32
            assert made.element_epilogue is (DataType.s32 if exact else DataType.f32)


def test_tf32_is_multiplied_and_fp32_is_read() -> None:
    for kernel in kernels(problem("tf32")):
        made = gemm_operation(cutlass(kernel))
        assert made.tile_description.math_instruction.element_a is DataType.tf32
        assert (made.A.element, made.D.element) == (DataType.f32, DataType.f32)
        assert made.A.alignment == 4


@pytest.mark.parametrize("layout", ["nt", "tt", "nn"])
def test_tf32_has_kernels_where_both_operands_are_k_major_only(layout: str) -> None:
    with pytest.raises(NoLegalCandidate, match="no backend has kernels"):
        kernels(problem("tf32", layout))


@pytest.mark.parametrize("dtype", ROWS)
def test_factors_per_row_of_a_large_odd_output_have_no_kernel(
    dtype: str, h200: DeviceModel
) -> None:
    m, n, k = ODD_N
    with pytest.raises(NoLegalCandidate):
        candidates(problem(dtype, m=m, n=n, k=k), h200)
    assert predict(problem(dtype, m=m, n=n, k=k), h200) is None
    assert candidates(problem(dtype.removesuffix(".scale_row"), m=m, n=n, k=k), h200)


@pytest.mark.parametrize("dtype", ROWS[1:])
def test_fp8_by_rows_has_the_kernels_of_one_factor_that_store_by_tma(dtype: str) -> None:
    """And our own that split K; some of them promote their sums."""
    plain, rows = (kernels(problem(each)) for each in (dtype.removesuffix(".scale_row"), dtype))
    assert {each.name.removesuffix("_scale_row") for each in rows} == {
        each.name
        for each in plain
        if each.backend is Backend.CUTE or cutlass(each).epilogue is EpilogueSchedule.TMA
    }
    assert any(not cutlass(each).fast_accumulation for each in rows)


def test_only_units_that_need_them_read_other_instructions() -> None:
    plain = slim_headers()
    integer = slim_headers(frozenset({Element.S8}))
    tf32 = slim_headers(frozenset({Element.TF32}))
    name = "cute/arch/mma_sm90_gmma.hpp"
    empty = "struct MMA_64x8x{}_SS_TN {{}};"
    for text, kept in ((plain, ()), (integer, ("32_S32S8S8",)), (tf32, ("8_F32TF32TF32",))):
        for each in ("32_S32S8S8", "8_F32TF32TF32"):
            assert (empty.format(each) in text[name]) is (each not in kept)
    assert sum(map(len, plain.values())) < sum(map(len, integer.values()))
