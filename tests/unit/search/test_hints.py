"""What cuBLAS's kernel names say, our kernels like them, and winners of near problems."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.kernel import Kernel, MainloopSchedule, TileScheduler
from gemmsmith.core.launch import Decomposition, Launch
from gemmsmith.core.problem import DType, Layout, Problem
from tests.support.candidates import KERNEL
from tests.support.replacing import replace
from tests.support.serving import H200, winner
from tuner.backends import candidates, kernels
from tuner.search.hints import (
    CublasChoice,
    choice_of,
    distance,
    hinted,
    near_winners,
    parse,
    splits,
)
from tuner.store import Store

REDUCTION = (
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, "
    "true, true, false>(cublasLt::cublasSplitKParams<float>, float const*)"
)
MEMSET = "Memset (Device)"
SEGMENT_K = "execute_segment_k_off_kernel__5x_cublas"
KNOWN = {
    "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN": CublasChoice(
        tile=(192, 192),
        depth=64,
        stages=4,
        cluster=(2, 1),
        raster="v",
        cooperative="B",
        transposed="TNN",
    ),
    "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTT": CublasChoice(
        tile=(128, 256),
        depth=64,
        stages=4,
        cluster=(1, 2),
        raster="h",
        cooperative="A",
        transposed="NTT",
    ),
    "nvjet_tst_64x8_64x16_4x1_v_bz_splitK_TNT": CublasChoice(
        tile=(64, 8),
        depth=64,
        stages=16,
        cluster=(4, 1),
        raster="v",
        split_k=True,
        transposed="TNT",
    ),
    "nvjet_qqtst_128x128_128x6_1x2_h_bz_coopA_TNT": CublasChoice(
        tile=(128, 128),
        depth=128,
        stages=6,
        cluster=(1, 2),
        raster="h",
        cooperative="A",
        transposed="TNT",
    ),
    "nvjet_sm90_hss_64x8_64x16_1x1_h_bz_splitK_NNT": CublasChoice(
        tile=(64, 8), depth=64, stages=16, raster="h", split_k=True, transposed="NNT"
    ),
    "nvjet_tst_128x64_64x8_2x1_v_badd_NTN": CublasChoice(
        tile=(128, 64), depth=64, stages=8, cluster=(2, 1), raster="v", transposed="NTN"
    ),
    f"sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_{SEGMENT_K}": (
        CublasChoice(tile=(128, 128), depth=64, transposed="TNN")
    ),
    f"sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize64x256x128_warpgroupsize1x2x1_{SEGMENT_K}": (
        CublasChoice(tile=(64, 256), depth=128, cooperative="B", transposed="TNN")
    ),
    "sm90_xmma_gemm_f16f16_f16f32_f32_nn_n_tilesize64x64x64_cgasize2x1x1_execute_split_k_kernel": (
        CublasChoice(tile=(64, 64), depth=64, cluster=(2, 1), split_k=True, transposed="NNN")
    ),
    "sm80_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x64x32_stage4_warpsize2x2x1_tensor16x8x16": (
        CublasChoice(tile=(128, 64), depth=32, stages=4, transposed="TNN")
    ),
    "cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_32x3_tn_align1": CublasChoice(
        tile=(256, 128), depth=32, stages=3, transposed="TN"
    ),
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_relu_bf16_32x64_32x1_nn_align8"
    ">(cutlass_80_wmma_tensorop_bf16_s161616gemm_relu_bf16_32x64_32x1_nn_align8::Params)": (
        CublasChoice(tile=(32, 64), depth=32, stages=1, transposed="NN")
    ),
    "cutlass_75_tensorop_bf16_s1688gemm_bf16_256x128_nn_align1": CublasChoice(
        tile=(256, 128), transposed="NN"
    ),
    "ampere_bf16_s16816gemm_bf16_64x128_sliced1x2_ldg8_f2f_stages_64x5_nt": CublasChoice(
        tile=(64, 128), depth=64, stages=5, transposed="NT"
    ),
}
JUNK = (
    "",
    MEMSET,
    REDUCTION,
    "nvjet_",
    "nvjet_tst_0x128_64x4_2x1_v_bz_TNN",
    "nvjet_tst_128x128",
    "nvjet_sm120_tst_mma_64x64x128_3_32x32x128_tmaAB_alignCD4_bz_TNNN",
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>>(int)",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n",
    "cutlass_80_tensorop_bf16_s16816gemm_bf16_256x_32x3_tn_align1",
    "gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float, 128, 16>",
)


@pytest.mark.parametrize("name", KNOWN)
def test_names_of_every_form_are_understood(name: str) -> None:
    assert parse(name) == KNOWN[name]


@pytest.mark.parametrize("name", JUNK)
def test_what_is_no_known_product_is_no_choice(name: str) -> None:
    assert parse(name) is None
    assert choice_of([name]) is None


_PIECES = st.sampled_from(
    sorted({piece for name in (*KNOWN, *JUNK) for piece in name.split("_")} | {"_", "x", "64x64"})
)


@given(st.one_of(st.text(), st.lists(_PIECES, max_size=12).map("_".join)))
def test_no_name_is_an_error_and_what_is_understood_makes_sense(name: str) -> None:
    choice = parse(name)
    if choice is not None:
        assert min(*choice.tile, *choice.cluster) >= 1
        assert min(choice.depth, choice.stages) >= 0
        assert distance(choice, Candidate(kernel=KERNEL)) >= 0.0


def test_a_reduction_after_the_product_says_that_it_was_split() -> None:
    product = "nvjet_tst_64x32_64x9_2x1_v_bz_TNN"
    plain = choice_of([MEMSET, product])
    assert plain is not None
    assert not plain.split_k
    assert choice_of([MEMSET, product, REDUCTION]) == replace(plain, split_k=True)
    assert choice_of([]) is None


def candidate(tile: tuple[int, int, int], **changes: object) -> Candidate:
    launch = changes.pop("launch", Launch())
    assert isinstance(launch, Launch)
    name = f"{tile}{changes}"
    kernel: Kernel = replace(KERNEL, name=name, tile=tile, **changes)  # type: ignore[arg-type]
    return Candidate(kernel=kernel, launch=launch)


SPLIT = Launch(decomposition=Decomposition.SPLIT_K, splits=4)
WIDE = CublasChoice(tile=(256, 128), depth=64, cluster=(2, 1), cooperative="A")
LIKE_WIDE = {"mainloop": MainloopSchedule.COOPERATIVE}


def test_cublas_m_runs_along_our_n() -> None:
    swapped = candidate((256, 128, 64), cluster=(2, 1), swapped=True, **LIKE_WIDE)
    exchanged = candidate((128, 256, 64), cluster=(1, 2), **LIKE_WIDE)
    across = candidate((256, 128, 64), cluster=(2, 1), **LIKE_WIDE)
    assert distance(WIDE, swapped) == distance(WIDE, exchanged) == 0.0
    assert distance(WIDE, across) == 1.0 + 1.0 + 0.25 + 0.25


def test_the_tile_counts_most_then_splitting_then_the_rest() -> None:
    best = {"cluster": (1, 2), **LIKE_WIDE}
    ordered = [
        candidate((128, 256, 64), **best),
        candidate((128, 256, 128), **best),
        candidate((128, 256, 64), cluster=(1, 2)),
        candidate((128, 256, 64), **best, scheduler=TileScheduler.SPLIT_K, launch=SPLIT),
        candidate((128, 128, 64), **best),
        candidate((64, 64, 64), **best),
    ]
    distances = [distance(WIDE, each) for each in ordered]
    assert distances == sorted(set(distances))


def test_only_launches_that_split_are_near_a_split_product() -> None:
    stream_k = Launch(decomposition=Decomposition.STREAM_K)
    assert splits(candidate((64, 64, 64), scheduler=TileScheduler.STREAM_K, launch=stream_k))
    for scheduler in (TileScheduler.STREAM_K, TileScheduler.SPLIT_K, TileScheduler.CLUSTER_SPLIT_K):
        assert splits(candidate((64, 64, 64), scheduler=scheduler, launch=SPLIT))
        assert not splits(candidate((64, 64, 64), scheduler=scheduler))
    name = "nvjet_tst_64x64_64x8_1x1_v_bz_splitK_TNN"
    choice = choice_of([name])
    assert choice is not None
    field = candidates(Problem(m=128, n=128, k=16384), H200)
    assert all(splits(each) for each in hinted(field, choice))
    assert not any(splits(each) for each in hinted(field, replace(choice, split_k=False)))


def test_fp8_with_fast_accumulation_is_nearer() -> None:
    fast, precise = (
        candidate((128, 256, 64), dtype=DType.FP8_E4M3, fast_accumulation=fast)
        for fast in (True, False)
    )
    assert distance(WIDE, fast) < distance(WIDE, precise)


def test_a_hint_is_a_few_distinct_kernels_in_rank_order() -> None:
    first, second = Launch(swizzle=2), Launch(swizzle=1)
    near = candidate((128, 256, 64), launch=first, **LIKE_WIDE)
    field = [
        candidate((64, 64, 64)),
        near,
        replace(near, launch=second),
        candidate((256, 128, 64), swapped=True, **LIKE_WIDE),
        candidate((128, 128, 64)),
    ]
    assert hinted(field, WIDE, limit=2) == [near, field[3]]
    assert len(hinted(field, WIDE)) == 4
    assert hinted(field, WIDE, limit=0) == []
    assert hinted([], WIDE) == []


@pytest.mark.parametrize(
    ("problem", "name"),
    [
        (Problem(m=4096, n=4096, k=4096), "nvjet_tst_256x128_64x4_2x1_v_bz_coopA_TNN"),
        (Problem(m=16, n=4096, k=4096), "nvjet_tst_64x16_64x16_2x1_v_bz_TNT"),
        (
            Problem(m=13, n=4097, k=4096),
            "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64",
        ),
        (
            Problem(m=64, n=512, k=777),
            "cutlass_80_tensorop_bf16_s16816gemm_bf16_64x64_32x6_tn_align1",
        ),
        (
            Problem(m=4096, n=4096, k=4096, dtype=DType.FP8_E4M3, layout=Layout.TN),
            "nvjet_qqtst_256x128_128x4_2x1_v_bz_coopA_TNT",
        ),
    ],
    ids=str,
)
def test_the_space_holds_something_near(problem: Problem, name: str) -> None:
    choice = choice_of([name])
    assert choice is not None
    hints = hinted(candidates(problem, H200), choice)
    assert len({each.kernel.name for each in hints}) == len(hints) == 6
    assert distance(choice, hints[0]) <= 1.0


ASKED = Problem(m=4096, n=4096, k=4096, dtype=DType.FP16)


@pytest.fixture
def store(sqlite_url: str) -> Iterator[Store]:
    with Store.open(sqlite_url) as opened:
        yield opened


def test_a_bf16_winner_leads_as_its_fp16_twin(store: Store) -> None:
    far = winner(replace(ASKED, m=1024))
    twin = winner(replace(ASKED, dtype=DType.BF16))
    third = kernels(ASKED)[2]
    far = replace(far, candidate=Candidate(kernel=third))
    store.promote(far)
    store.promote(twin)
    seeds = near_winners(store, ASKED, H200.slug)
    assert [seed.kernel for seed in seeds] == [kernels(ASKED)[0], third]


def test_a_near_winner_that_is_illegal_here_is_left_out(store: Store) -> None:
    store.promote(winner(ASKED))
    assert near_winners(store, replace(ASKED, k=4097), H200.slug) == []


def test_fp8_winners_stay_among_themselves(store: Store) -> None:
    store.promote(winner(ASKED))
    fp8 = replace(ASKED, dtype=DType.FP8_E4M3, layout=Layout.TN)
    assert near_winners(store, fp8, H200.slug) == []
