"""Descriptions of kernels: the backend and the compile-time choices.

A backend (`tuner.backends`) decides which kernels are legal and generates their C++;
`gemmsmith.runtime` runs the compiled kernel.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from gemmsmith.core.launch import Decomposition, Launch
from gemmsmith.core.operation import Layout, Operation, Scaling, named
from gemmsmith.core.plain import Plain
from gemmsmith.core.summation import MMA, PROMOTED, SEQUENTIAL, split


class Backend(StrEnum):
    """Where a kernel comes from."""

    CUTLASS3X = "cutlass3x"  # CollectiveBuilder kernels: TMA or cp.async with wgmma
    CUTLASS2X = "cutlass2x"  # multistage mma.sync kernels: any alignment
    CUTE = "cute"  # our own kernels, written on CUTLASS's CuTe
    CUBLASLT = "cublaslt"  # algorithms of cuBLASLt, of the library that torch loaded
    PLUGIN = "plugin"  # kernels that a package beside gemmsmith adds (`PluginKernel`)


_BACKENDS: dict[object, Backend] = {backend.value: backend for backend in Backend}
"""Backends by the tag of their kernels' class. A lookup is faster than `Backend(tag)`."""


class MainloopSchedule(StrEnum):
    """How the mainloop overlaps loads with tensor-core work."""

    MULTISTAGE = "multistage"  # CUTLASS 2.x: every warp loads and computes
    CPASYNC_WARP_SPECIALIZED = "cpasync_warpspecialized"  # producer warps issue cp.async
    WARP_SPECIALIZED = "warpspecialized"  # one TMA producer warp, one consumer warpgroup
    PINGPONG = "warpspecialized_pingpong"  # two consumer warpgroups on two tiles in turn
    COOPERATIVE = "warpspecialized_cooperative"  # two consumer warpgroups share one tile
    TCGEN05_ONE_SM = "tcgen05_1sm"  # Blackwell: one SM's tensor core, sums in tensor memory
    TCGEN05_TWO_SM = "tcgen05_2sm"  # Blackwell: two SMs of a cluster compute a tile together


TMA_MAINLOOPS = frozenset(
    {MainloopSchedule.WARP_SPECIALIZED, MainloopSchedule.PINGPONG, MainloopSchedule.COOPERATIVE}
)


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
    GROUPS = "groups"  # persistent over the tiles of all groups, located by the groups' offsets


SLICED = (TileScheduler.SPLIT_K, TileScheduler.CLUSTER_SPLIT_K)
"""Schedulers of our own that cut K into slices, and add the slices' sums in their order."""


class Kernel(Plain, msgspec.Struct, frozen=True, kw_only=True, tag_field="backend"):
    """The fields that kernels of all backends have. Subclasses add their own.

    `AnyKernel` is the union of the backends' kernels. Readers reject a kernel of another class.

    Attributes:
        name: the kernel's unique name; CUTLASS's procedural name if it has one.
        arch: target architecture, such as `sm90` (compiled as sm_90a).
        dtype, layout: of the *problem's* operation, also if the kernel swaps the operands.
        alignment_a, alignment_b, alignment_d: rows of the problem's A, B and D must start at
            multiples of this many elements.
    """

    name: str
    arch: str
    dtype: str
    layout: Layout
    alignment_a: int
    alignment_b: int
    alignment_d: int

    @property
    def backend(self) -> Backend:
        return _BACKENDS[self.__struct_config__.tag]

    @property
    def source(self) -> str:
        """The name of the kernel's backend; of a plugin's kernel, the plugin's name."""
        return self.backend.value

    @property
    def operation(self) -> Operation:
        return named(self.dtype, self.layout)

    @property
    def output_tile(self) -> tuple[int, int]:
        """Rows and columns of D that one thread block computes, in the kernel's own orientation.

        Returns (0, 0) if it is not known.
        """
        return (0, 0)

    @property
    def choices(self) -> tuple[tuple[str, object], ...]:
        """The choices, by name, in which kernels of a backend differ: features of a cost model."""
        return ()

    @property
    def keeps_short_sums(self) -> bool:
        """FP8: whether sums stay in the tensor core, which keeps about 13 bits of fraction."""
        return False

    def has_fixed_order(self, launch: Launch) -> bool:
        """Whether each output element is summed in a fixed order: same inputs, same bits."""
        return launch.splits == 1

    def summation(self, launch: Launch) -> str | None:  # noqa: ARG002 - subclasses read it
        """The order of a sum along K (`gemmsmith.core.summation`): equal orders, equal bits.

        Returns None if the order is not known or depends on M, so that a row's bits may depend on
        it. Integers add up to the same in every order.
        """
        return None

    def splits_sums(self, launch: Launch) -> bool:
        """Whether several partial sums along K are added for each output element."""
        return launch.splits > 1

    def rounds_parts(self, launch: Launch) -> bool:
        """Whether partial sums may be rounded to D's type before they are added."""
        # cuBLASLt's algorithms may do so; all other kernels add in the accumulator's type.
        return self.splits_sums(launch)

    @property
    def family(self) -> str:
        # Kernels of the same types and layout share nearly all of their compile time.
        return f"{self.source}_{self.arch}_{self.dtype}_{self.layout}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"


class CutlassTraits(Kernel, frozen=True, kw_only=True):
    """A kernel built from CUTLASS components.

    Attributes:
        tile: (M, N, K) of one thread block's output tile, in the kernel's own orientation.
        cluster: thread blocks per cluster along (M, N), in the kernel's own orientation.
        stages: depth of the shared-memory pipeline; 0 lets CUTLASS fill shared memory.
        swapped: computes Dᵀ = Bᵀ·Aᵀ, so that its tile M runs along the problem's N.
        fast_accumulation: FP8 only: the tensor core keeps the whole sum.
    """

    tile: tuple[int, int, int]
    cluster: tuple[int, int]
    stages: int
    mainloop: MainloopSchedule
    epilogue: EpilogueSchedule
    scheduler: TileScheduler
    swapped: bool = False
    fast_accumulation: bool = False

    @property
    def output_tile(self) -> tuple[int, int]:
        return self.tile[:2]

    @property
    def choices(self) -> tuple[tuple[str, object], ...]:
        return (
            ("tile", self.tile[:2]),
            ("depth", self.tile[2]),
            ("cluster", self.cluster),
            ("swapped", self.swapped),
            ("mainloop", self.mainloop),
            ("scheduler", self.scheduler),
        )

    @property
    def keeps_short_sums(self) -> bool:
        # Only CUTLASS's TMA mainloops have a variant that adds sums in FP32 registers. The cp.async
        # and 2.x mainloops chain the instructions: relative error 5.01e-3 for 256×256×32768 e4m3
        # with cp.async on an H200.
        promotes = self.mainloop in TMA_MAINLOOPS and not self.fast_accumulation
        return self.operation.is_narrow_float and not promotes

    def has_fixed_order(self, launch: Launch) -> bool:
        # The order is fixed if a thread block computes a whole tile, or if our own kernels add the
        # slices. CUTLASS's stream-K scheduler, which has split-K modes too, promises no order.
        return not self.splits_sums(launch) or self.scheduler is not TileScheduler.STREAM_K

    def summation(self, launch: Launch) -> str | None:
        # A grouped kernel adds a tile's terms as a single product's kernel does. Rows of other
        # groups in a tile do not enter a row's sum, and terms behind a group's last are zeros.
        cut = launch.decomposition
        is_sliced = cut is Decomposition.SPLIT_K and self.scheduler in SLICED
        if self.operation.a.is_integer or not (cut is Decomposition.DATA_PARALLEL or is_sliced):
            return None
        is_our_store = self.scheduler in SLICED or self.operation.is_grouped
        if self.operation.scaling is Scaling.ROW and not (self.swapped or is_our_store):
            # CUTLASS's epilogue multiplies by the kernel's columns' factors first, which rounds
            # otherwise. If it is swapped, these are the problem's rows', as in our own stores.
            # Grouped products with factors have stores of our own only.
            return None
        if self.mainloop is MainloopSchedule.MULTISTAGE:
            return MMA
        promotes = self.operation.is_narrow_float and not self.keeps_short_sums
        order = PROMOTED if promotes else SEQUENTIAL
        return split(order, launch.splits) if is_sliced and launch.splits > 1 else order

    def splits_sums(self, launch: Launch) -> bool:
        return launch.decomposition is not Decomposition.DATA_PARALLEL

    def rounds_parts(self, launch: Launch) -> bool:  # noqa: ARG002 - the same for every launch
        return False


class Cutlass3xKernel(CutlassTraits, frozen=True, kw_only=True, tag=Backend.CUTLASS3X.value):
    """An instance of CUTLASS 3.x's `GemmUniversal`; `name` is CUTLASS's procedural name."""


class Cutlass2xKernel(CutlassTraits, frozen=True, kw_only=True, tag=Backend.CUTLASS2X.value):
    """An instance of CUTLASS 2.x's `GemmUniversal`; `name` is CUTLASS's procedural name."""


class CuteKernel(CutlassTraits, frozen=True, kw_only=True, tag=Backend.CUTE.value):
    """Our own kernel around CUTLASS's mainloop."""


class CublasLtKernel(Kernel, frozen=True, kw_only=True, tag=Backend.CUBLASLT.value):
    """cuBLASLt's product for an operation. The launch's algorithm decides which kernel runs.

    Attributes:
        fast_accumulation: FP8 only: the tensor core keeps the whole sum.
    """

    fast_accumulation: bool = False

    @property
    def keeps_short_sums(self) -> bool:
        return self.fast_accumulation


class PluginKernel(Kernel, frozen=True, kw_only=True, tag=Backend.PLUGIN.value):
    """A kernel of a plugin: a package that adds a backend (entry point `gemmsmith.backends`).

    To run the compiled kernel, the package is not needed.

    Attributes:
        plugin: the plugin's name.
        tile: (M, N, K) of one thread block's output tile.
        traits: all other choices in which kernels of the plugin differ, by name.

    Raises:
        ValueError: the name is not `<plugin>_…`, both in letters, digits and underscores.
    """

    plugin: str
    tile: tuple[int, int, int]
    traits: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        # No plugin can describe a kernel of another backend: names are unique.
        words = (self.name, self.plugin)
        is_plain = all(word.isascii() and word.isidentifier() for word in words)
        if not is_plain or not self.name.startswith(f"{self.plugin}_"):
            raise ValueError(
                f"a kernel of the plugin {self.plugin!r:.200} is called {self.name!r:.200}; name "
                "it <plugin>_…, and both in letters, digits and underscores"
            )

    @property
    def source(self) -> str:
        return self.plugin

    @property
    def output_tile(self) -> tuple[int, int]:
        return self.tile[:2]

    @property
    def choices(self) -> tuple[tuple[str, object], ...]:
        return (("plugin", self.plugin), ("tile", self.tile), *self.traits)


CutlassKernel = Cutlass3xKernel | Cutlass2xKernel | CuteKernel
AnyKernel = Cutlass3xKernel | Cutlass2xKernel | CuteKernel | CublasLtKernel | PluginKernel
"""A kernel of any backend. The tag `backend` tells a decoder which class it is."""


def cutlass(kernel: Kernel) -> CutlassKernel:
    """Narrows the type of a kernel; raises TypeError if its backend is not one of CUTLASS's."""
    if not isinstance(kernel, CutlassKernel):
        raise TypeError(f"{kernel.name} of {kernel.backend} has no tile, cluster or schedule")
    return kernel


CUTLASS_KERNELS: dict[Backend, type[CutlassKernel]] = {
    Backend.CUTLASS3X: Cutlass3xKernel,
    Backend.CUTLASS2X: Cutlass2xKernel,
    Backend.CUTE: CuteKernel,
}
