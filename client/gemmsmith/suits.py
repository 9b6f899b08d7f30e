"""Whether a winner's kernel and launch can run another problem, judged without the tuner.

The small part of `tuner.space.legality` that depends on the problem: a kernel out of a snapshot
was measured, so what depends on the kernel alone holds. It may refuse more than the tuner does,
which costs speed, and never less, which would cost a failed launch; a test compares the two.
"""

from __future__ import annotations

from gemmsmith.answer import Config
from gemmsmith.kernel import CutlassKernel, TileScheduler
from gemmsmith.problem import Problem

_MAX_TILES = 2**31 - 1
"""CUTLASS counts tiles in 32 bits."""
_MAX_GRID_SIDE = 65535
"""CUDA's limit for a grid's second and third dimension. Persistent kernels do without; they are
refused all the same, as so large a problem is far from whatever was measured."""

_SLICED = (TileScheduler.SPLIT_K, TileScheduler.CLUSTER_SPLIT_K)


def refusal(config: Config, problem: Problem) -> str | None:
    """Why the config must not be launched on densely laid out operands; None when it may be."""
    kernel = config.kernel
    if (kernel.dtype, kernel.layout) != (problem.operation.of_kernels.dtype, problem.layout):
        return f"built for {kernel.dtype} {kernel.layout}"
    for name, extent, alignment in (
        ("A", problem.contiguous_a, kernel.alignment_a),
        ("B", problem.contiguous_b, kernel.alignment_b),
        ("D", problem.n, kernel.alignment_d),
    ):
        if extent % alignment:
            return f"rows of {name} are {extent} elements apart, not a multiple of {alignment}"
    if not isinstance(kernel, CutlassKernel):
        return None
    splits = config.launch.splits
    return _grid_refusal(kernel, problem) or _splits_refusal(kernel, splits, problem)


def _grid_refusal(kernel: CutlassKernel, problem: Problem) -> str | None:
    m, n = (problem.n, problem.m) if kernel.swapped else (problem.m, problem.n)
    # Whole clusters: tiles that only fill up a cluster are launched too.
    sides = [
        -(-extent // (tile * blocks)) * blocks
        for extent, tile, blocks in zip((m, n), kernel.tile[:2], kernel.cluster, strict=True)
    ]
    if sides[0] * sides[1] * problem.batch > _MAX_TILES:
        return f"{sides[0]}×{sides[1]} tiles, {problem.batch} times, exceed a 32-bit count"
    if sides[1] > _MAX_GRID_SIDE or problem.batch > _MAX_GRID_SIDE:
        return f"{sides[1]} tiles along N or {problem.batch} batches exceed the grid"
    return None


def _splits_refusal(kernel: CutlassKernel, splits: int, problem: Problem) -> str | None:
    if kernel.scheduler in _SLICED and problem.batch > 1:
        return "K is split for single matrices only"
    if splits > -(-problem.k // kernel.tile[2]):
        return f"{splits} splits have too few K tiles between them"
    if kernel.scheduler is TileScheduler.SPLIT_K and problem.k % (splits * kernel.alignment_a):
        return f"{problem.k} is not {splits} equal slices that start on 16 bytes"
    return None
