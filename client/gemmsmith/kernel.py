"""What is compiled: one CUTLASS kernel, described by the choices that make it.

Descriptions only: `tuner.space` decides which are legal, `tuner.codegen` turns one into C++,
`gemmsmith.runtime` runs the compiled result.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from gemmsmith.problem import DType, Layout


class Backend(StrEnum):
    """The template library generation a kernel is instantiated from."""

    CUTLASS3X = "cutlass3x"  # CollectiveBuilder kernels: TMA or cp.async with wgmma
    CUTLASS2X = "cutlass2x"  # multistage mma.sync kernels: any alignment
    CUTE = "cute"  # our own kernels, written on CUTLASS's CuTe


class MainloopSchedule(StrEnum):
    """How the mainloop overlaps loads with tensor-core work."""

    MULTISTAGE = "multistage"  # CUTLASS 2.x: every warp loads and computes
    CPASYNC_WARP_SPECIALIZED = "cpasync_warpspecialized"  # producer warps issue cp.async
    WARP_SPECIALIZED = "warpspecialized"  # one TMA producer warp, one consumer warpgroup
    PINGPONG = "warpspecialized_pingpong"  # two consumer warpgroups on two tiles in turn
    COOPERATIVE = "warpspecialized_cooperative"  # two consumer warpgroups share one tile


class EpilogueSchedule(StrEnum):
    """How accumulators reach global memory."""

    TMA = "tma"  # through shared memory and TMA stores; needs 16-byte aligned rows of D
    NO_SMEM = "nosmem"  # straight from registers; any alignment of D
    THREADBLOCK = "threadblock"  # CUTLASS 2.x: through shared memory, vectorized stores


class TileScheduler(StrEnum):
    """How output tiles are handed to thread blocks."""

    GRID = "grid"  # one thread block per tile (not persistent)
    PERSISTENT = "persistent"  # as many thread blocks as fit, each takes tiles in turn
    STREAM_K = "stream_k"  # persistent; tiles may be split along K between thread blocks
    SPLIT_K = "split_k"  # persistent over slices of K; a second kernel adds the FP32 partials
    CLUSTER_SPLIT_K = "cluster_split_k"  # a cluster shares a tile along K, adds in shared memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """One compiled kernel's description; `name` is CUTLASS's procedural name and is unique.

    Attributes:
        name: CUTLASS's procedural name, the kernel's identity everywhere.
        arch: target architecture, such as `sm90` (compiled as sm_90a).
        dtype, layout: those of the *problem* it serves, whether operands are swapped or not.
        alignment_a, alignment_b, alignment_d: elements that every row start of the problem's
            A, B and D must be a multiple of.
        tile: (M, N, K) of one thread block's output tile, in the kernel's own orientation.
        cluster: thread blocks per cluster along (M, N), in the kernel's own orientation.
        stages: depth of the shared-memory pipeline; 0 lets CUTLASS fill shared memory.
        swapped: computes Dᵀ = Bᵀ·Aᵀ, so that its tile M runs along the problem's N.
        fast_accumulation: FP8 only: accumulate wholly in the tensor core.
    """

    name: str
    backend: Backend
    arch: str
    dtype: DType
    layout: Layout
    alignment_a: int
    alignment_b: int
    alignment_d: int
    tile: tuple[int, int, int]
    cluster: tuple[int, int]
    stages: int
    mainloop: MainloopSchedule
    epilogue: EpilogueSchedule
    scheduler: TileScheduler
    swapped: bool = False
    fast_accumulation: bool = False

    @property
    def family(self) -> str:
        """Kernels of one family share nearly all of their compile time: same types and layouts."""
        return f"{self.backend}_{self.arch}_{self.dtype}_{self.layout}"
