"""The legality rules that depend on the problem. Each rule is a named predicate, stated only here.

The tuner's backends use the same predicates to enumerate. A kernel from a snapshot was measured,
so the rules that depend on the kernel alone hold; these rules say whether it can run another
problem. A rule returns None if it is satisfied, else the reason. Its docstring names the place in
CUTLASS that requires it. Kernels without tiles satisfy all rules about tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

from gemmsmith.core.config import Config
from gemmsmith.core.kernel import (
    SLICED,
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
"""CUDA's limit for a grid's second and third dimension, which persistent kernels do not use."""

ProblemRule = Callable[[Kernel, Problem], str | None]
LaunchRule = Callable[[Kernel, Launch, Problem], str | None]


def serves_operation(kernel: Kernel, problem: Problem) -> str | None:
    """The kernel was built for the problem's operation. Any kernel can add to D (`beta`)."""
    if (kernel.dtype, kernel.layout) != (problem.operation.of_kernels.dtype, problem.layout):
        return f"built for {kernel.dtype} {kernel.layout}"
    return None


def rows_are_aligned(kernel: Kernel, problem: Problem) -> str | None:
    """Every row of A, B and D starts at the kernel's alignment (`can_implement`)."""
    # Rows follow each other without gaps, so the distance between them is the contiguous extent: K
    # for K-major operands, M for A in nt and nn, N for B in tt and nt, D's columns. The distance
    # between batches is a multiple of that, so batches are aligned if rows are.
    for name, extent, alignment in (
        ("A", problem.contiguous_a, kernel.alignment_a),
        ("B", problem.contiguous_b, kernel.alignment_b),
        ("D", problem.columns, kernel.alignment_d),
    ):
        if extent % alignment:
            return f"rows of {name} are {extent} elements apart, not a multiple of {alignment}"
    return None


def grid_is_launchable(kernel: Kernel, problem: Problem) -> str | None:
    """The tiles fit the grid: without persistence, tiles along N and batches are its y and z."""
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
    # Slices of K are stored as batches (`SplitKGemm`), so there cannot be batches as well.
    if not isinstance(kernel, CutlassKernel) or kernel.scheduler not in SLICED:
        return None
    return "K is split for single matrices only" if problem.batch > 1 else None


def every_split_has_k_tiles(kernel: Kernel, launch: Launch, problem: Problem) -> str | None:
    """Each split has at least one K tile (`can_implement`)."""
    if not isinstance(kernel, CutlassKernel):
        return None
    k_tiles = -(-problem.k // kernel.tile[2])
    if launch.splits > k_tiles:
        return f"{launch.splits} splits have {k_tiles} K tiles between them"
    return None


def slices_are_equal(kernel: Kernel, launch: Launch, problem: Problem) -> str | None:
    """Slices of K are equal, because they are batches, and TMA can read their start.

    See `SplitKGemm`.
    """
    if not isinstance(kernel, CutlassKernel) or kernel.scheduler is not TileScheduler.SPLIT_K:
        return None
    if problem.k % (launch.splits * kernel.alignment_a):
        return f"{problem.k} is not {launch.splits} equal slices that start on 16 bytes"
    return None


def sums_are_in_order(kernel: Kernel, launch: Launch, problem: Problem) -> str | None:
    """The launch adds up in the order that the operation demands, if it demands one.

    Slices of K must be equal: those of a cluster consist of K tiles, so that others would depend on
    the tile.
    """
    order = problem.operation.summation
    if order is None:
        return None
    if (own := kernel.summation(launch)) != order:
        return f"sums are {own or 'in no known order'}, not {order}"
    if isinstance(kernel, CutlassKernel) and kernel.scheduler is TileScheduler.CLUSTER_SPLIT_K:
        depth = launch.splits * kernel.tile[2]
        if launch.splits > 1 and problem.k % depth:
            return f"{problem.k} is not {launch.splits} equal slices of whole K tiles"
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
"""Rules for a kernel and a problem, by name."""

LAUNCH_RULES: MappingProxyType[str, LaunchRule] = MappingProxyType(
    {rule.__name__: rule for rule in (every_split_has_k_tiles, slices_are_equal, sums_are_in_order)}
)
"""Rules for a launch, by name. A launch that is legal for one K need not be legal for another."""


def needs_grid_limits(kernel: CutlassKernel) -> bool:
    """Whether tiles and batches become grid dimensions (not for persistent kernels)."""
    return (
        kernel.backend is Backend.CUTLASS2X
        or kernel.mainloop is MainloopSchedule.WARP_SPECIALIZED
        or kernel.scheduler is TileScheduler.GRID
    )


def problem_refusal(kernel: Kernel, problem: Problem) -> str | None:
    """Why the kernel cannot run the problem; None if it can."""
    for rule in PROBLEM_RULES.values():
        if reason := rule(kernel, problem):
            return reason
    return None


def launch_refusal(kernel: Kernel, launch: Launch, problem: Problem) -> str | None:
    """Why this launch is illegal for a problem that the kernel can run; None if it is legal."""
    for rule in LAUNCH_RULES.values():
        if reason := rule(kernel, launch, problem):
            return reason
    return None


def refusal(config: Config, problem: Problem) -> str | None:
    return problem_refusal(config.kernel, problem) or launch_refusal(
        config.kernel, config.launch, problem
    )
