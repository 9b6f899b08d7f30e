"""The grid of the default, by the names of its kernels.

A name has the tile and the cluster (`tuner.search.hints`). It says neither how often K is split nor
how many blocks share an SM: a split along K has no waves, and an SM counts as holding what fits
into its shared memory.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.problem import Problem
from tuner.arch import ARCHITECTURES
from tuner.explain.grid import MOST_BLOCKS, Grid, GridShape, grid_of
from tuner.search.hints import choice_of

_TORCH_GROUPED = re.compile(
    r"GmmaWarpSpecializedILi(?P<stages>\d+)E"
    r"NS\w?_IJNS\w?_1CILi(?P<cluster_m>\d+)EEE(?:NS\w+_ILi(?P<cluster_n>\d+)EEE)?\w{0,30}?"
    r"KernelPtrArrayTmaWarpSpecialized(?P<schedule>Pingpong|Cooperative)(?:FP8FastAccum)?EEE"
    r"NS\w?_IJNS\w?_ILi(?P<m>\d+)EEENS\w?_ILi(?P<n>\d+)EEE(?:NS\w?_ILi(?P<k>\d+)E)?",
    re.ASCII,
)
"""torch's grouped kernels, whose mangled names have cluster and tile. An extent that is missing is
a back-reference to the one before it."""
_OLDER = re.compile(r"cutlass_(?:75|80)_|ampere_|turing_|volta_|sm(?:75|80)_")


def of_names(names: Sequence[str], problem: Problem, device: DeviceModel) -> Grid | None:
    """The grid of the default, by the names of its kernels; None if none of them is understood."""
    arch = ARCHITECTURES.get(device.arch)
    if arch is None:
        return None
    for match in filter(None, map(_TORCH_GROUPED.search, names)):
        cluster_m = int(match["cluster_m"])
        cluster_n = int(match["cluster_n"] or cluster_m)
        shape = GridShape(
            tile=(int(match["m"]), int(match["n"]), int(match["k"] or match["n"])),
            cluster=(cluster_m, cluster_n),
            stages=int(match["stages"]),
            resident=arch.resident_blocks(device.sm_count, cluster_m * cluster_n),
            overlaps=match["schedule"] == "Pingpong",
        )
        return grid_of(shape, problem, device)
    choice = choice_of(names)
    if choice is None:
        return None
    (tile_n, tile_m), (cluster_n, cluster_m) = choice.tile, choice.cluster  # its M is our N
    element = problem.operation.a.bytes
    held = choice.stages * (tile_m + tile_n) * choice.depth * element
    return grid_of(
        GridShape(
            tile=(tile_m, tile_n, choice.depth),
            cluster=(cluster_m, cluster_n),
            stages=choice.stages,
            splits=0 if choice.split_k else 1,
            blocks_per_sm=max(1, min(MOST_BLOCKS, arch.shared_bytes // held)) if held else 1,
            resident=arch.resident_blocks(device.sm_count, cluster_m * cluster_n),
            overlaps=not choice.cooperative and any("nvjet" in name for name in names),
            is_older=any(_OLDER.search(name) for name in names),
        ),
        problem,
        device,
    )
