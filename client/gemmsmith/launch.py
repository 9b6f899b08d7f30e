"""What is chosen at run time for a compiled kernel, and the candidate that both make up."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from gemmsmith.kernel import Kernel


class RasterOrder(StrEnum):
    """Which way neighbouring thread blocks walk over the output tiles."""

    HEURISTIC = "heuristic"  # CUTLASS picks the shorter side
    ALONG_M = "along_m"  # consecutive tiles go down M
    ALONG_N = "along_n"  # consecutive tiles go across N


class Decomposition(StrEnum):
    """How the work of one problem is cut into pieces (stream-K scheduler; else data-parallel)."""

    DATA_PARALLEL = "data_parallel"  # one thread block computes a whole output tile
    SPLIT_K = "split_k"  # `splits` thread blocks share each tile along K
    STREAM_K = "stream_k"  # the last wave's work is spread evenly over all thread blocks
    HEURISTIC = "heuristic"  # CUTLASS picks among the above


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Run-time choices. `raster` and tiles are in the kernel's own orientation.

    Attributes:
        swizzle: largest number of tiles per swizzled group (1, 2, 4 or 8), for L2 reuse.
        splits: thread blocks per tile along K; more than 1 only with split-K or heuristic.
        sm_budget: streaming multiprocessors the kernel may occupy; 0 means all.
    """

    raster: RasterOrder = RasterOrder.HEURISTIC
    swizzle: int = 1
    decomposition: Decomposition = Decomposition.DATA_PARALLEL
    splits: int = 1
    sm_budget: int = 0

    @property
    def key(self) -> str:
        """Canonical short form, unique per launch: `along_m.s4.split_k.x2.sm0`."""
        return (
            f"{self.raster}.s{self.swizzle}.{self.decomposition}.x{self.splits}.sm{self.sm_budget}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A kernel together with how it is launched: what a trial measures."""

    kernel: Kernel
    launch: Launch = field(default_factory=Launch)

    @property
    def key(self) -> str:
        """Unique short form: the kernel's name and the launch's key."""
        return f"{self.kernel.name}@{self.launch.key}"
