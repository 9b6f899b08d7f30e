"""The space as a whole: never empty, never illegal, never two kernels of one name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import (
    TMA_MAINLOOPS,
    Backend,
    EpilogueSchedule,
    Kernel,
    MainloopSchedule,
    TileScheduler,
)
from gemmsmith.core.launch import RasterOrder
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import DType, Layout, Problem
from tests.support.types import FLOATS
from tuner.arch import SM90
from tuner.backends import Level, candidates, kernels, launches, refusal
from tuner.backends.cute import own_kernels as cute
from tuner.backends.cutlass import package
from tuner.backends.cutlass.operation import gemm_operation, is_padded, name_of, tma_alignment
from tuner.backends.cutlass2x import multistage as cutlass2x
from tuner.backends.cutlass3x import families as cutlass3x
from tuner.backends.cutlass3x import full
from tuner.errors import NoLegalCandidate

FAMILIES = [
    (dtype, layout)
    for dtype in FLOATS
    for layout in Layout
    if not Operation.of(dtype).is_narrow_float or layout is Layout.TN
]


def test_cutlass_headers_and_version() -> None:
    for directory in package.include_dirs():
        assert directory.is_dir()
    assert (package.include_dirs()[0] / "cutlass" / "cutlass.h").is_file()
    assert package.version().startswith("4.")


def test_importing_the_space_neither_prints_nor_writes(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import tuner.backends"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert (done.stdout, done.stderr) == ("", "")
    assert list(tmp_path.iterdir()) == []


problems = st.builds(
    lambda family, m, n, k, batch: Problem(
        m=m, n=n, k=k, batch=batch, dtype=family[0], layout=family[1]
    ),
    st.sampled_from(FAMILIES),
    *(
        st.one_of(st.sampled_from([1, 7, 13, 127, 129, 1000, 8191]), st.integers(1, 1 << 16))
        for _ in range(3)
    ),
    st.integers(1, 64),
)


@settings(max_examples=200, deadline=None)
@given(problem=problems)
def test_every_problem_has_legal_kernels_of_unique_names(problem: Problem) -> None:
    listed = kernels(problem)
    assert 1 <= len(listed) <= 300
    assert len({kernel.name for kernel in listed}) == len(listed)
    for kernel in listed:
        assert refusal(kernel, problem) is None


@settings(max_examples=50, deadline=None)
@given(problem=problems)
def test_every_problem_has_distinct_candidates(problem: Problem) -> None:
    device = DeviceModel(
        name="NVIDIA H200", arch="sm90", sm_count=132, memory_bytes=1, l2_bytes=50 << 20
    )
    listed = candidates(problem, device)
    assert listed
    assert len({candidate.key for candidate in listed}) == len(listed)
    for kernel in {candidate.kernel.name: candidate.kernel for candidate in listed}.values():
        assert refusal(kernel, problem) is None  # those fitted to the problem included


@settings(max_examples=200, deadline=None)
@given(
    problem=st.builds(
        lambda family, m, n, k, batch: Problem(
            m=m, n=n, k=k, batch=batch, dtype=family[0], layout=family[1]
        ),
        st.sampled_from(FAMILIES),
        *(
            st.one_of(
                st.sampled_from([8, 12, 4096, 524240, 524256, 524280, 2**21, 2**24 + 1, 2**31 - 8]),
                st.integers(1, 1 << 12),
            )
            for _ in range(3)
        ),
        st.sampled_from([1, 2, 3, 65535, 65536, 2**20]),
    )
)
def test_remembered_kernels_are_those_that_the_rules_allow(problem: Problem) -> None:
    """Kernels are remembered for a small problem of the same alignment: the rules must agree."""
    judged = [
        kernel
        for folder in (cutlass3x, cutlass2x, cute)
        for kernel in folder.legal.__wrapped__(problem, SM90, Level.CORE)
    ]
    if judged:
        assert kernels(problem) == judged
    else:
        with pytest.raises(NoLegalCandidate):
            kernels(problem)


def _is_one_operation(kernel: Kernel) -> bool:
    """CUTLASS's kernel and nothing of ours: its name is CUTLASS's to the letter."""
    splits = (TileScheduler.SPLIT_K, TileScheduler.CLUSTER_SPLIT_K)
    return kernel.scheduler not in splits and not is_padded(kernel)


@pytest.mark.parametrize(("dtype", "layout"), FAMILIES)
def test_names_tell_every_core_kernel_apart_and_follow_its_operation(
    dtype: DType, layout: Layout
) -> None:
    every: dict[str, object] = {}
    for m, n, k in ((4096,) * 3, (4096, 4095, 4096), (4092,) * 3, (4094,) * 3, (4095,) * 3):
        for kernel in kernels(Problem(m=m, n=n, k=k, dtype=dtype, layout=layout)):
            assert every.setdefault(kernel.name, kernel) == kernel
            assert name_of(kernel) == kernel.name
            assert kernel.name.isidentifier()
            procedural = gemm_operation(kernel).procedural_name()
            assert (procedural == kernel.name) is _is_one_operation(kernel)


def test_names_say_what_is_ours() -> None:
    aligned = kernels(Problem(m=4096, n=4096, k=4096))
    for kernel in aligned:
        assert ("_split_k" in kernel.name) is ("split_k" in kernel.scheduler)
        assert kernel.name.startswith("gemmsmith_") is (kernel.backend is Backend.CUTE)
        assert "_align8_" in kernel.name
    for kernel in kernels(Problem(m=4096, n=4096, k=4095)):
        assert f"{kernel.name}_".count("_align1_") == 1
        assert is_padded(kernel) is (kernel.mainloop in TMA_MAINLOOPS)


@pytest.mark.long
def test_names_are_injective_over_the_full_space_of_all_layouts() -> None:
    """Across layouts too: problem layout and orientation are both in CUTLASS's three letters."""
    seen: dict[str, Kernel] = {}

    def add(found: tuple[Kernel, ...]) -> None:
        for kernel in found:
            # Kernels that add up in a cluster store any D: they are in the lists of both epilogues.
            known = seen.setdefault(kernel.name, kernel)
            assert known is kernel or (known == kernel and kernel.backend is Backend.CUTE)

    for layout in Layout:
        operation = Operation.of(DType.BF16, layout)
        for epilogue in (EpilogueSchedule.TMA, EpilogueSchedule.NO_SMEM):
            add(full.tma_kernels(operation, epilogue))
            add(full.padded_kernels(operation, epilogue))
        for alignment in (2, 4, 8):
            add(full.cpasync_kernels(operation, alignment))
        add(cutlass2x.multistage_kernels(operation))
        add(cute.every(operation))
    assert len(seen) > 50_000


@pytest.mark.parametrize(
    ("dtype", "layout", "n", "k"),
    [
        (DType.BF16, Layout.NN, 4096, 4096),
        (DType.BF16, Layout.NN, 4095, 4096),
        (DType.BF16, Layout.NN, 4092, 4092),
        (DType.BF16, Layout.NN, 4095, 4095),
        pytest.param(DType.FP8_E4M3, Layout.TN, 4096, 4096, marks=pytest.mark.long),
    ],
)
def test_full_holds_core(dtype: DType, layout: Layout, n: int, k: int) -> None:
    problem = Problem(m=4096, n=n, k=k, dtype=dtype, layout=layout)
    names = {kernel.name for kernel in kernels(problem, level=Level.FULL)}
    assert {kernel.name for kernel in kernels(problem)} <= names


@pytest.mark.parametrize(("dtype", "layout"), FAMILIES)
def test_core_covers_what_wins(dtype: DType, layout: Layout) -> None:
    listed = kernels(Problem(m=4096, n=4096, k=4096, dtype=dtype, layout=layout))
    assert 100 <= len(listed) <= 300
    assert {kernel.mainloop for kernel in listed} == {
        MainloopSchedule.WARP_SPECIALIZED,
        MainloopSchedule.PINGPONG,
        MainloopSchedule.COOPERATIVE,
    }
    assert {kernel.scheduler for kernel in listed} == set(TileScheduler) - {TileScheduler.GROUPS}
    assert {kernel.swapped for kernel in listed} == {False, True}
    assert {kernel.fast_accumulation for kernel in listed} == (
        {False, True} if Operation.of(dtype).is_narrow_float else {False}
    )


CPASYNC = MainloopSchedule.CPASYNC_WARP_SPECIALIZED
MULTISTAGE = MainloopSchedule.MULTISTAGE


@pytest.mark.parametrize(
    ("dtype", "layout", "mnk", "other", "alignment", "whole_d"),
    [
        # tn: K is contiguous in A and B, N in D.
        (DType.BF16, Layout.TN, (7, 4096, 4096), None, 8, True),
        (DType.BF16, Layout.TN, (4096, 4097, 4096), None, 8, False),
        (DType.BF16, Layout.TN, (4096, 4096, 4100), CPASYNC, 4, True),
        (DType.BF16, Layout.TN, (4096, 4096, 4098), CPASYNC, 2, True),
        (DType.BF16, Layout.TN, (4096, 4098, 4098), CPASYNC, 2, False),
        (DType.BF16, Layout.TN, (4096, 4096, 4097), MULTISTAGE, 1, True),
        (DType.BF16, Layout.TN, (4096, 4097, 4097), MULTISTAGE, 1, False),
        # tt: K in A, N in B and D; M may be anything.
        (DType.BF16, Layout.TT, (4097, 4096, 4096), None, 8, True),
        (DType.BF16, Layout.TT, (4096, 4098, 4096), CPASYNC, 2, False),
        # nt: M in A, N in B and D; K may be anything.
        (DType.FP16, Layout.NT, (4096, 4096, 4097), None, 8, True),
        (DType.FP16, Layout.NT, (4097, 4096, 4096), MULTISTAGE, 1, True),
        # nn: M in A, K in B, N in D.
        (DType.BF16, Layout.NN, (4096, 4097, 4096), None, 8, False),
        (DType.BF16, Layout.NN, (4098, 4096, 4096), CPASYNC, 2, True),
        # FP8: 16 elements to 16 bytes, 8 of D.
        (DType.FP8_E4M3, Layout.TN, (4096, 4104, 4096), None, 16, True),
        (DType.FP8_E4M3, Layout.TN, (4096, 4096, 4104), CPASYNC, 8, True),
        (DType.FP8_E4M3, Layout.TN, (4096, 4096, 4100), CPASYNC, 4, True),
        (DType.FP8_E5M2, Layout.TN, (4096, 4096, 4098), MULTISTAGE, 1, True),
    ],
)
def test_alignment_chooses_the_family(
    dtype: DType,
    layout: Layout,
    mnk: tuple[int, int, int],
    other: MainloopSchedule | None,
    alignment: int,
    whole_d: bool,
) -> None:
    """Rows that TMA cannot read are copied for it, or read by the kernels that take them."""
    m, n, k = mnk
    listed = kernels(Problem(m=m, n=n, k=k, dtype=dtype, layout=layout))
    tma = [kernel for kernel in listed if kernel.mainloop in TMA_MAINLOOPS]
    others = [kernel for kernel in listed if kernel.mainloop not in TMA_MAINLOOPS]
    assert tma
    assert all(is_padded(kernel) is (other is not None) for kernel in tma)
    assert {kernel.alignment_a for kernel in tma} == {
        1 if other else tma_alignment(Operation.of(dtype))
    }
    assert (EpilogueSchedule.TMA in {kernel.epilogue for kernel in tma}) is whole_d
    assert {kernel.mainloop for kernel in others} == ({other} if other else set())
    assert {kernel.alignment_a for kernel in others} == ({alignment} if other else set())
    for kernel in others:
        assert kernel.epilogue is not EpilogueSchedule.TMA
        assert (kernel.backend is Backend.CUTLASS2X) == (other is MULTISTAGE)


@pytest.mark.parametrize(
    ("layout", "swapped", "letters"),
    [
        (Layout.TN, False, "tnt"),
        (Layout.TT, False, "ttt"),
        (Layout.NT, False, "ntt"),
        (Layout.NN, False, "nnt"),
        (Layout.TN, True, "tnn"),
        (Layout.TT, True, "nnn"),
        (Layout.NT, True, "ntn"),
        (Layout.NN, True, "ttn"),
    ],
)
def test_swapped_kernels_are_column_major_d(layout: Layout, swapped: bool, letters: str) -> None:
    """Dᵀ = Bᵀ·Aᵀ: B's letter flips and comes first, A's flips and comes second."""
    listed = kernels(Problem(m=4096, n=4096, k=4096, layout=layout))
    names = [kernel.name for kernel in listed if kernel.swapped is swapped]
    assert names
    assert all(f"_{letters}_" in name for name in names)


def test_swapping_exchanges_fp8_element_types() -> None:
    listed = kernels(Problem(m=4096, n=4096, k=4096, dtype=DType.FP8_E5M2))
    for kernel in listed:
        types = "e4m3_e5m2" if kernel.swapped else "e5m2_e4m3"
        stored = "f32_f32" if kernel.scheduler is TileScheduler.SPLIT_K else "bf16_bf16"
        assert f"gemm_{types}_f32_{stored}_" in kernel.name


def test_order_is_deterministic() -> None:
    problem = Problem(m=100, n=104, k=4096)
    assert [kernel.name for kernel in kernels(problem)] == [
        kernel.name for kernel in kernels(problem)
    ]


def test_unknown_architecture_says_which_there_are() -> None:
    with pytest.raises(NoLegalCandidate, match="sm90"):
        kernels(Problem(m=1, n=1, k=1), "sm75")


@pytest.mark.parametrize("extent", [2**31 - 8, 2**31 - 1])
def test_unlaunchable_grid_is_an_error_that_says_what_to_do(extent: int) -> None:
    with pytest.raises(NoLegalCandidate, match="compute it in parts"):
        kernels(Problem(m=extent, n=extent, k=8))


def test_more_batches_than_a_grid_holds_are_left_to_persistent_kernels() -> None:
    for k in (1, 2, 8):
        listed = kernels(Problem(m=1, n=1, k=k, batch=1 << 20))
        assert {kernel.scheduler for kernel in listed} <= {
            TileScheduler.PERSISTENT,
            TileScheduler.STREAM_K,
        }


@pytest.mark.parametrize(
    ("dtype", "layout", "backends"),
    [
        ("bf16.group_rows", Layout.TN, {Backend.CUTLASS3X, Backend.CUTE}),
        ("fp16.group_rows", Layout.TT, {Backend.CUTLASS3X, Backend.CUTE}),
        ("bf16.group_depth", Layout.NT, {Backend.CUTLASS3X}),
        ("bf16.out_f32.group_depth.accumulate", Layout.NT, {Backend.CUTLASS3X}),
    ],
)
def test_groups_have_kernels_of_their_own(
    dtype: str, layout: Layout, backends: set[Backend], h200: DeviceModel
) -> None:
    problem = Problem(m=4096, n=4096, k=4096, batch=32, dtype=dtype, layout=layout)
    listed = kernels(problem)
    assert {kernel.backend for kernel in listed} == backends
    assert {kernel.swapped for kernel in listed} == {False, True}
    for kernel in listed:
        orders = [each.raster for each in launches(kernel, problem, h200)]
        assert orders == [RasterOrder.ALONG_M, RasterOrder.ALONG_N]
        assert refusal(kernel, Problem(m=4096, n=4096, k=4096)) is not None
    assert len(kernels(problem, level=Level.FULL)) > 1000
