"""Orders of sums: the class of every kernel and launch, and the candidates of a class."""

from __future__ import annotations

import pytest

from gemmsmith.core import legality
from gemmsmith.core.candidate import Candidate
from gemmsmith.core.kernel import (
    CutlassKernel,
    Kernel,
    MainloopSchedule,
    TileScheduler,
)
from gemmsmith.core.launch import Algorithm, Decomposition, Launch
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import Problem
from tests.support.replacing import replace
from tests.support.serving import H200
from tuner.backends import Level, candidates, is_legal, kernels
from tuner.backends.cublaslt.algorithms import kernel_for, kernel_of
from tuner.errors import NoLegalCandidate

CUTS = (
    Launch(),
    *(Launch(decomposition=Decomposition.SPLIT_K, splits=splits) for splits in (2, 3, 16)),
    Launch(decomposition=Decomposition.STREAM_K),
    Launch(decomposition=Decomposition.HEURISTIC),
    Launch(decomposition=Decomposition.HEURISTIC, splits=4),
)
OPERATIONS = (
    *(f"{dtype}.{layout}" for dtype in ("bf16", "fp16") for layout in ("tn", "tt", "nt", "nn")),
    "bf16.out_f32.nt",
    "bf16.out_f32.accumulate.nt",
    "bf16.then_bias_gelu.tn",
    "bf16.then_silu_gate_aux.tn",
    "bf16.then_dgelu.tt",
    "fp8_e4m3.scale_row.tn",
    "fp8_e5m2.scale_row.tn",
    *(f"bf16.group_rows.{layout}" for layout in ("tn", "tt")),
    "fp16.out_f32.group_rows.tn",
    "bf16.group_rows.then_silu_gate_aux.tn",
    "bf16.group_rows.then_dsilu_gate_act.tt",
    "bf16.group_depth.nt",
    "bf16.out_f32.group_depth.accumulate.nt",
    "fp8_e4m3.scale_row.group_rows.tn",
)
SHAPES = ((64, 4096, 4096), (4096, 4096, 14336), (50, 4096, 4100), (63, 4094, 4097))


def expected(kernel: CutlassKernel, launch: Launch) -> str | None:
    """The class, in other words than the library's."""
    if launch.decomposition is not Decomposition.DATA_PARALLEL and (
        launch.decomposition is not Decomposition.SPLIT_K or "split_k" not in kernel.scheduler
    ):
        return None
    ours = "split_k" in kernel.scheduler or "group" in kernel.dtype
    if "scale_row" in kernel.dtype and not (kernel.swapped or ours):
        return None
    if kernel.mainloop is MainloopSchedule.MULTISTAGE:
        order = "mma"
    else:
        by_tma = kernel.mainloop is not MainloopSchedule.CPASYNC_WARP_SPECIALIZED
        promotes = kernel.dtype.startswith("fp8") and by_tma and not kernel.fast_accumulation
        order = "promoted" if promotes else "sequential"
    if launch.splits == 1:
        return order
    return f"split_{launch.splits}" if order == "sequential" else f"{order}_split_{launch.splits}"


@pytest.mark.parametrize("key", OPERATIONS)
def test_every_kernel_and_launch_has_its_class(key: str) -> None:
    for shape in SHAPES:
        problem = Problem.of(Operation.parse(key), *shape)
        # The full level has the same schedules at thousands of tiles.
        full = key == "bf16.tn" and shape is SHAPES[0]
        try:
            space = kernels(problem, level=Level.FULL if full else Level.CORE)
        except NoLegalCandidate:
            assert shape in SHAPES[2:]  # epilogues need rows that TMA reads and stores
            continue
        for kernel in space:
            assert isinstance(kernel, CutlassKernel)
            for launch in CUTS:
                assert kernel.summation(launch) == expected(kernel, launch), kernel.name


def test_the_library_and_integers_have_no_class() -> None:
    library = kernel_of(Operation.of("bf16"), "sm90")
    assert library is not None
    chosen = Launch(algorithm=Algorithm.of(1, [0] * 8))
    assert library.summation(chosen) is library.summation(Launch()) is None
    for kernel in kernels(Problem(64, 64, 64, dtype="int8")):
        assert kernel.summation(Launch()) is None


@pytest.mark.parametrize("key", OPERATIONS)
def test_an_ordered_problem_is_offered_its_class_alone(key: str) -> None:
    for shape in SHAPES:
        plain = Problem.of(Operation.parse(key), *shape)
        try:
            known = candidates(plain, H200)
        except NoLegalCandidate:
            continue
        orders = {candidate.summation for candidate in known} - {None}
        assert orders & {"sequential", "promoted", "mma"}
        for order in orders:
            problem = replace(plain, dtype=f"{plain.dtype}.sum_{order}")
            same = [c for c in known if c.summation == order and is_legal(c, problem)]
            # Only uneven slices are left out.
            assert len(same) == sum(c.summation == order for c in known) or "split" in str(order)
            if same:
                assert candidates(problem, H200) == same
            else:
                with pytest.raises(NoLegalCandidate):
                    candidates(problem, H200)
            others = [c for c in known if c.summation != order]
            assert not any(is_legal(candidate, problem) for candidate in others)


def test_slices_are_equal_whatever_the_tile() -> None:
    problem = Problem(64, 4096, 4096, dtype="bf16.sum_split_3")
    launch = Launch(decomposition=Decomposition.SPLIT_K, splits=3)
    of_clusters: list[Kernel] = [
        kernel
        for kernel in kernels(problem)
        if isinstance(kernel, CutlassKernel) and kernel.scheduler is TileScheduler.CLUSTER_SPLIT_K
    ]
    assert of_clusters
    for kernel in of_clusters:
        candidate = Candidate(kernel=kernel, launch=launch)
        assert is_legal(candidate, replace(problem, dtype="bf16"))
        assert not is_legal(candidate, problem)
        assert "equal slices" in str(legality.launch_refusal(kernel, launch, problem))
        assert is_legal(candidate, replace(problem, k=3 * 1024))


def test_the_library_is_not_offered_to_an_ordered_problem() -> None:
    problem = Problem(64, 4096, 4096)
    assert kernel_for(problem, "sm90") is not None
    assert kernel_for(replace(problem, dtype="bf16.sum_sequential"), "sm90") is None


def test_kernels_do_not_know_orders() -> None:
    """Their names, and so packs and digests, are those of plain problems."""
    plain = Problem(64, 4096, 4096)
    for kernel in kernels(replace(plain, dtype="bf16.sum_sequential"), level=Level.FULL):
        assert kernel.dtype == "bf16"
    assert kernels(replace(plain, dtype="bf16.sum_sequential")) == kernels(plain)
