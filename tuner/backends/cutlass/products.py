"""The product of all choices of a kernel, for an exhaustive search and for tests of the rules.

Deterministic: the order is that of the loops.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from msgspec import structs

from gemmsmith.core.kernel import CutlassKernel, EpilogueSchedule, MainloopSchedule, TileScheduler
from gemmsmith.core.operation import Operation
from tuner.backends.cutlass import footprint
from tuner.backends.cutlass.operation import kernel
from tuner.backends.cutlass.rules import KernelRule, choice_refusal
from tuner.backends.cutlass.wgmma import tiles_k

TILES_M = (64, 128, 256)
TILES_N = tuple(range(8, 257, 8))
CLUSTERS = ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4), (4, 2), (2, 4))
EXPLICIT_STAGES = (2, 3, 4, 6, 8, 12)
"""Pipelines that may be shallower than the automatic one, so that several thread blocks of a plain
warp-specialized kernel share an SM. Persistent kernels run one block per SM, and gain nothing."""

_SHARING_SM = (TileScheduler.GRID, TileScheduler.CLUSTER_SPLIT_K, TileScheduler.GROUPS)


def tma_products(
    schedules: Sequence[tuple[MainloopSchedule, TileScheduler]],
    operation: Operation,
    epilogue: EpilogueSchedule,
    alignment: int,
    rules: Mapping[str, KernelRule],
) -> Iterator[CutlassKernel]:
    """All kernels with a TMA mainloop, without names, whether or not `rules` allow them.

    If several thread blocks may share an SM, legal kernels are followed by shallower pipelines.
    """
    accumulation = (True, False) if operation.is_narrow_float else (False,)
    choices = product(
        schedules, TILES_M, TILES_N, tiles_k(operation), CLUSTERS, (False, True), accumulation
    )
    for (mainloop, scheduler), m, n, k, cluster, swapped, fast in choices:
        automatic = kernel(
            operation=operation,
            tile=(m, n, k),
            cluster=cluster,
            mainloop=mainloop,
            epilogue=epilogue,
            scheduler=scheduler,
            alignment=alignment,
            swapped=swapped,
            fast_accumulation=fast,
            name=False,
        )
        yield automatic
        if scheduler not in _SHARING_SM or choice_refusal(automatic, rules):
            continue
        deepest = footprint.stages(automatic)
        for stages in EXPLICIT_STAGES:
            if stages < deepest:
                yield structs.replace(automatic, stages=stages)
