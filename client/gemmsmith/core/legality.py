"""Every rule that depends on the problem, each one a named predicate; stated here and nowhere else.

The tuner's backends enumerate by the same predicates. A kernel out of a snapshot was measured, so
what depends on the kernel alone holds; whether it can run another problem is what these rules
say. Each gives None for legal, else the reason. What a rule says in CUTLASS is named beside it.
A rule about tiles has nothing to say of a kernel without them.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

from gemmsmith.core.config import Config
from gemmsmith.core.kernel import (
    Backend,
    CutlassKernel,
    Kernel,
    MainloopSchedule,
    TileScheduler,
)
from gemmsmith.core.launch import Launch
from gemmsmith.core.problem import Problem
from gemmsmith.core.tiles import tile_grid

MAX_TILES = 2**31 - 1
"""CUTLASS counts tiles in 32 bits."""

MAX_GRID_YZ = 65535
"""CUDA's limit for a grid's second and third dimension. Persistent kernels do without."""

_SLICED = (TileScheduler.SPLIT_K, TileScheduler.CLUSTER_SPLIT_K)

ProblemRule = Callable[[Kernel, Problem], str | None]
LaunchRule = Callable[[Kernel, Launch, Problem], str | None]


def serves_operation(kernel: Kernel, problem: Problem) -> str | None:
    """The kernel was built for the problem's operation; any can add to D (`beta`)."""
    if (kernel.dtype, kernel.layout) != (problem.operation.of_kernels.dtype, problem.layout):
        return f"built for {kernel.dtype} {kernel.layout}"
    return None


def rows_are_aligned(kernel: Kernel, problem: Problem) -> str | None:
    """Every row of A, B and D starts at the kernel's alignment (`can_implement`).

    Rows lie as densely as their contiguous extent says: K for K-major operands, M for A in nt and
    nn, N for B in tt and nt, D's columns. Batches are whole matrices apart: they align with them.
    """
    for name, extent, alignment in (
        ("A", problem.contiguous_a, kernel.alignment_a),
        ("B", problem.contiguous_b, kernel.alignment_b),
        ("D", problem.columns, kernel.alignment_d),
    ):
        if extent % alignment:
            return f"rows of {name} are {extent} elements apart, not a multiple of {alignment}"
    return None


def grid_is_launchable(kernel: Kernel, problem: Problem) -> str | None:
    """Kernels with a block per tile: tiles along N and batches are grid dimensions y and z."""
    if not isinstance(kernel, CutlassKernel):
        return None
    grid = tile_grid(kernel, problem)
    if grid.tiles > MAX_TILES:
        return f"{grid.tiles} tiles do not fit a 32-bit count"
    if not needs_grid_limits(kernel):
        return None
    # Identity8 folds up to 8 tiles along N into the grid's x (CUTLASS 2.x).
    folded = 8 if kernel.backend is Backend.CUTLASS2X and grid.tiles_n >= 6 else 1
    if -(-grid.tiles_n // folded) > MAX_GRID_YZ or problem.batch > MAX_GRID_YZ:
        return f"{grid.tiles_n} tiles along N or {problem.batch} batches exceed the grid"
    return None


def splitting_takes_one_matrix(kernel: Kernel, problem: Problem) -> str | None:
    """Slices of K take the place of batches; FP32 partials leave in quads (`SplitKGemm`)."""
    if not isinstance(kernel, CutlassKernel) or kernel.scheduler not in _SLICED:
        return None
    return "K is split for single matrices only" if problem.batch > 1 else None


def every_split_has_k_tiles(kernel: Kernel, launch: Launch, problem: Problem) -> str | None:
    """No split is left without a K tile (`can_implement`)."""
    if not isinstance(kernel, CutlassKernel):
        return None
    k_tiles = -(-problem.k // kernel.tile[2])
    if launch.splits > k_tiles:
        return f"{launch.splits} splits have {k_tiles} K tiles between them"
    return None


def slices_are_equal(kernel: Kernel, launch: Launch, problem: Problem) -> str | None:
    """Slices of K that become batches are equal, and start where TMA can read (`SplitKGemm`)."""
    if not isinstance(kernel, CutlassKernel) or kernel.scheduler is not TileScheduler.SPLIT_K:
        return None
    if problem.k % (launch.splits * kernel.alignment_a):
        return f"{problem.k} is not {launch.splits} equal slices that start on 16 bytes"
    return None


PROBLEM_RULES: MappingProxyType[str, ProblemRule] = MappingProxyType(
    {
        rule.__name__: rule
        for rule in (
            serves_operation,
            rows_are_aligned,
            grid_is_launchable,
            splitting_takes_one_matrix,
        )
    }
)
"""What a kernel must satisfy for a problem."""

LAUNCH_RULES: MappingProxyType[str, LaunchRule] = MappingProxyType(
    {rule.__name__: rule for rule in (every_split_has_k_tiles, slices_are_equal)}
)
"""What a launch of it must satisfy: one that was found for one K need not be legal for another."""


def needs_grid_limits(kernel: CutlassKernel) -> bool:
    """Whether tiles and batches become grid dimensions (not for persistent kernels)."""
    return (
        kernel.backend is Backend.CUTLASS2X
        or kernel.mainloop is MainloopSchedule.WARP_SPECIALIZED
        or kernel.scheduler is TileScheduler.GRID
    )


def problem_refusal(kernel: Kernel, problem: Problem) -> str | None:
    """Why the kernel cannot run the problem; None when it can."""
    for rule in PROBLEM_RULES.values():
        if reason := rule(kernel, problem):
            return reason
    return None


def launch_refusal(kernel: Kernel, launch: Launch, problem: Problem) -> str | None:
    """Why the kernel cannot be launched so on a problem that it can run; None when it can."""
    for rule in LAUNCH_RULES.values():
        if reason := rule(kernel, launch, problem):
            return reason
    return None


def refusal(config: Config, problem: Problem) -> str | None:
    """Why the config must not be launched on densely laid out operands; None when it may be."""
    return problem_refusal(config.kernel, problem) or launch_refusal(
        config.kernel, config.launch, problem
    )
