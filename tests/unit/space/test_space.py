"""The space as a whole: never empty, never illegal, never two kernels of one name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmsmith.device import DeviceModel
from gemmsmith.kernel import Backend, EpilogueSchedule, MainloopSchedule, TileScheduler
from gemmsmith.problem import DType, Layout, Problem
from tuner.errors import NoLegalCandidate
from tuner.space import Level, candidates, cutlass, full, kernels, operation, refusal

FAMILIES = [
    (dtype, layout)
    for dtype in DType
    for layout in Layout
    if not dtype.is_fp8 or layout is Layout.TN
]


def test_cutlass_headers_and_version() -> None:
    for directory in cutlass.include_dirs():
        assert directory.is_dir()
    assert (cutlass.include_dirs()[0] / "cutlass" / "cutlass.h").is_file()
    assert cutlass.version().startswith("4.")


def test_importing_the_space_neither_prints_nor_writes(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import tuner.space"],
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
    found = kernels(problem)
    assert 1 <= len(found) <= 200
    assert len({kernel.name for kernel in found}) == len(found)
    for kernel in found:
        assert refusal(kernel, problem) is None


@settings(max_examples=50, deadline=None)
@given(problem=problems)
def test_every_problem_has_distinct_candidates(problem: Problem) -> None:
    device = DeviceModel(
        name="NVIDIA H200", arch="sm90", sm_count=132, memory_bytes=1, l2_bytes=50 << 20
    )
    found = candidates(problem, device)
    assert found
    assert len({candidate.key for candidate in found}) == len(found)


@pytest.mark.parametrize(("dtype", "layout"), FAMILIES)
def test_names_tell_every_core_kernel_apart_and_follow_its_operation(
    dtype: DType, layout: Layout
) -> None:
    every: dict[str, object] = {}
    for m, n, k in ((4096,) * 3, (4096, 4095, 4096), (4092,) * 3, (4094,) * 3, (4095,) * 3):
        for kernel in kernels(Problem(m=m, n=n, k=k, dtype=dtype, layout=layout)):
            assert every.setdefault(kernel.name, kernel) == kernel
            assert operation(kernel).procedural_name() == kernel.name
            assert kernel.name.isidentifier()


def test_names_are_injective_over_the_full_space_of_all_layouts() -> None:
    """Across layouts too: problem layout and orientation are both in CUTLASS's three letters."""
    seen: dict[str, object] = {}
    count = 0
    for layout in Layout:
        for epilogue in (EpilogueSchedule.TMA, EpilogueSchedule.NO_SMEM):
            for kernel in full.tma_kernels(DType.BF16, layout, epilogue):
                seen[kernel.name] = kernel
                count += 1
        for alignment in (2, 4, 8):
            for kernel in full.cpasync_kernels(DType.BF16, layout, alignment):
                seen[kernel.name] = kernel
                count += 1
        for kernel in full.multistage_kernels(DType.BF16, layout):
            seen[kernel.name] = kernel
            count += 1
    assert len(seen) == count > 50_000


def test_full_holds_core() -> None:
    problem = Problem(m=4096, n=4096, k=4096, layout=Layout.NN)
    names = {kernel.name for kernel in kernels(problem, level=Level.FULL)}
    assert {kernel.name for kernel in kernels(problem)} <= names


@pytest.mark.parametrize(("dtype", "layout"), FAMILIES)
def test_core_covers_what_wins(dtype: DType, layout: Layout) -> None:
    found = kernels(Problem(m=4096, n=4096, k=4096, dtype=dtype, layout=layout))
    assert 100 <= len(found) <= 200
    assert {kernel.mainloop for kernel in found} == {
        MainloopSchedule.WARP_SPECIALIZED,
        MainloopSchedule.PINGPONG,
        MainloopSchedule.COOPERATIVE,
    }
    assert {kernel.scheduler for kernel in found} == set(TileScheduler)
    assert {kernel.swapped for kernel in found} == {False, True}
    assert {kernel.fast_accumulation for kernel in found} == (
        {False, True} if dtype.is_fp8 else {False}
    )


@pytest.mark.parametrize(
    ("dtype", "layout", "mnk", "mainloop", "epilogue"),
    [
        # tn: K is contiguous in A and B, N in D.
        (DType.BF16, Layout.TN, (7, 4096, 4096), "tma", EpilogueSchedule.TMA),
        (DType.BF16, Layout.TN, (4096, 4097, 4096), "tma", EpilogueSchedule.NO_SMEM),
        (DType.BF16, Layout.TN, (4096, 4096, 4098), "cpasync", EpilogueSchedule.NO_SMEM),
        (DType.BF16, Layout.TN, (4096, 4096, 4097), "multistage", EpilogueSchedule.THREADBLOCK),
        # tt: K in A, N in B and D; M may be anything.
        (DType.BF16, Layout.TT, (4097, 4096, 4096), "tma", EpilogueSchedule.TMA),
        (DType.BF16, Layout.TT, (4096, 4098, 4096), "cpasync", EpilogueSchedule.NO_SMEM),
        # nt: M in A, N in B and D; K may be anything.
        (DType.FP16, Layout.NT, (4096, 4096, 4097), "tma", EpilogueSchedule.TMA),
        (DType.FP16, Layout.NT, (4097, 4096, 4096), "multistage", EpilogueSchedule.THREADBLOCK),
        # nn: M in A, K in B, N in D.
        (DType.BF16, Layout.NN, (4096, 4097, 4096), "tma", EpilogueSchedule.NO_SMEM),
        (DType.BF16, Layout.NN, (4098, 4096, 4096), "cpasync", EpilogueSchedule.NO_SMEM),
        # FP8: 16 elements to 16 bytes, 8 of D.
        (DType.FP8_E4M3, Layout.TN, (4096, 4104, 4096), "tma", EpilogueSchedule.TMA),
        (DType.FP8_E4M3, Layout.TN, (4096, 4096, 4104), "cpasync", EpilogueSchedule.NO_SMEM),
        (DType.FP8_E4M3, Layout.TN, (4096, 4096, 4100), "cpasync", EpilogueSchedule.NO_SMEM),
        (DType.FP8_E5M2, Layout.TN, (4096, 4096, 4098), "multistage", EpilogueSchedule.THREADBLOCK),
    ],
)
def test_alignment_chooses_the_family(
    dtype: DType,
    layout: Layout,
    mnk: tuple[int, int, int],
    mainloop: str,
    epilogue: EpilogueSchedule,
) -> None:
    m, n, k = mnk
    for kernel in kernels(Problem(m=m, n=n, k=k, dtype=dtype, layout=layout)):
        kind = {
            MainloopSchedule.MULTISTAGE: "multistage",
            MainloopSchedule.CPASYNC_WARP_SPECIALIZED: "cpasync",
        }.get(kernel.mainloop, "tma")
        assert (kind, kernel.epilogue) == (mainloop, epilogue)
        assert (kernel.backend is Backend.CUTLASS2X) == (mainloop == "multistage")


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
    found = kernels(Problem(m=4096, n=4096, k=4096, layout=layout))
    names = [kernel.name for kernel in found if kernel.swapped is swapped]
    assert names
    assert all(f"_{letters}_" in name for name in names)


def test_swapping_exchanges_fp8_element_types() -> None:
    found = kernels(Problem(m=4096, n=4096, k=4096, dtype=DType.FP8_E5M2))
    for kernel in found:
        types = "e4m3_e5m2" if kernel.swapped else "e5m2_e4m3"
        assert f"gemm_{types}_f32_bf16_bf16" in kernel.name


def test_order_is_deterministic() -> None:
    problem = Problem(m=100, n=104, k=4096)
    assert [kernel.name for kernel in kernels(problem)] == [
        kernel.name for kernel in kernels(problem)
    ]


def test_unknown_architecture_says_which_there_are() -> None:
    with pytest.raises(NoLegalCandidate, match="sm90"):
        kernels(Problem(m=1, n=1, k=1), "sm75")


def test_unlaunchable_grid_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(NoLegalCandidate, match="pad K"):
        kernels(Problem(m=1, n=1, k=1, batch=1 << 20))
