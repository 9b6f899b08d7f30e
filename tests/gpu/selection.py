"""Which kernels the GPU tests build: few enough to compile in a minute or two on 16 cores, many
enough that every schedule meets every precision and layout.

Chosen from the space itself without a GPU, so that the list is the same on every machine: kernels
are taken greedily, each the one that shows most pairs of features not seen yet in its family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import combinations

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import Backend, Kernel, MainloopSchedule, TileScheduler
from gemmsmith.core.launch import Decomposition, Launch
from gemmsmith.core.legality import launch_refusal
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import DType, Layout, Problem
from tests.support.types import FLOATS
from tuner.backends import Level, kernels, launches, refusal

FAMILIES = tuple(
    (dtype, layout)
    for dtype in FLOATS
    for layout in (Layout if not Operation.of(dtype).is_narrow_float else (Layout.TN,))
)
EXTENTS = (1, 7, 13, 127, 129, 1000, 8191)

TMA_MAINLOOPS = (
    MainloopSchedule.WARP_SPECIALIZED,
    MainloopSchedule.PINGPONG,
    MainloopSchedule.COOPERATIVE,
)


def _plain(kernel: Kernel, mainloop: MainloopSchedule) -> bool:
    """A TMA kernel of CUTLASS's own that neither splits K nor copies its operands first."""
    whole = kernel.scheduler in (TileScheduler.GRID, TileScheduler.PERSISTENT)
    return kernel.mainloop is mainloop and whole and kernel.alignment_a > 1


KINDS: dict[str, Callable[[Kernel], bool]] = {
    "warp_specialized": lambda k: _plain(k, MainloopSchedule.WARP_SPECIALIZED),
    "pingpong": lambda k: _plain(k, MainloopSchedule.PINGPONG),
    "cooperative": lambda k: _plain(k, MainloopSchedule.COOPERATIVE),
    "stream_k": lambda k: k.scheduler is TileScheduler.STREAM_K,
    "split_k_warp_specialized": lambda k: (
        k.scheduler is TileScheduler.SPLIT_K and k.mainloop is MainloopSchedule.WARP_SPECIALIZED
    ),
    "split_k_pingpong": lambda k: (
        k.scheduler is TileScheduler.SPLIT_K and k.mainloop is MainloopSchedule.PINGPONG
    ),
    "split_k_cooperative": lambda k: (
        k.scheduler is TileScheduler.SPLIT_K and k.mainloop is MainloopSchedule.COOPERATIVE
    ),
    "cluster_split_k": lambda k: k.backend is Backend.CUTE and not k.swapped,
    "cluster_split_k_swapped": lambda k: k.backend is Backend.CUTE and k.swapped,
    "padded": lambda k: padded(k) and k.alignment_d > 1,
    "padded_any_d": lambda k: padded(k) and k.alignment_d == 1,
    "cpasync": lambda k: k.mainloop is MainloopSchedule.CPASYNC_WARP_SPECIALIZED,
    "multistage": lambda k: k.backend is Backend.CUTLASS2X,
}
"""Every schedule of the space, told by what a kernel is, not by what it is called."""

HAND_WRITTEN = tuple(kind for kind in KINDS if kind.startswith(("split", "cluster", "padded")))
KIND_DTYPES = (DType.BF16, DType.FP8_E4M3)
EVEN_SPLITS = (2, 3, 5, 7, 16)
CLUSTER_SPLITS = (1, 2, 3, 5, 7, 8, 11, 13, 16)

_PER_FAMILY = {DType.BF16: 7, DType.FP16: 6, DType.FP8_E4M3: 12, DType.FP8_E5M2: 7}
_PER_ODD_FAMILY = 1


def aligned(dtype: DType, layout: Layout) -> Problem:
    """Rows of 16 bytes everywhere, but no extent a multiple of a tile."""
    return Problem(m=528, n=784, k=2080, dtype=dtype, layout=layout)


def less_aligned(dtype: DType, layout: Layout) -> tuple[Problem, ...]:
    """Problems that TMA cannot take: D only, everything by half, everything."""
    return tuple(
        Problem(m=m, n=n, k=k, dtype=dtype, layout=layout)
        for m, n, k in ((528, 127, 2080), (260, 516, 1028), (130, 258, 514), (129, 127, 131))
    )


def unaligned_operands(dtype: DType, layout: Layout) -> Problem:
    """TMA can store D, but not read A."""
    return Problem(m=527, n=784, k=1031, dtype=dtype, layout=layout)


def odd_problems(dtype: DType, layout: Layout) -> tuple[Problem, ...]:
    """Every awkward extent in every position, the other two moderate; then all three at once."""
    found = []
    for extent in EXTENTS:
        for m, n, k in ((extent, 256, 320), (256, extent, 320), (256, 320, extent)):
            found.append(Problem(m=m, n=n, k=k, dtype=dtype, layout=layout))
    for m, n, k in ((1, 1, 1), (7, 13, 127), (129, 8191, 1), (1, 127, 8191), (1000, 7, 1000)):
        found.append(Problem(m=m, n=n, k=k, dtype=dtype, layout=layout))
    return tuple(found)


def batched(dtype: DType, layout: Layout) -> tuple[Problem, ...]:
    """Aligned and odd, more than one at a time."""
    return tuple(
        Problem(m=m, n=n, k=k, batch=batch, dtype=dtype, layout=layout)
        for m, n, k, batch in ((272, 144, 528, 3), (96, 33, 65, 7), (16, 16, 64, 130))
    )


@cache
def chosen(dtype: DType, layout: Layout) -> tuple[Kernel, ...]:
    """The kernels that tests build for a family."""
    picked = _greedy(kernels(aligned(dtype, layout), level=Level.CORE), _PER_FAMILY[dtype])
    if (dtype, layout) == (DType.BF16, Layout.TN):
        wide = kernels(aligned(dtype, layout), level=Level.FULL)
        picked += _greedy(
            [k for k in wide if k.stages in (3, 4, 6) or k.cluster in ((2, 4), (4, 2))],
            4,
        )
    for problem in (*less_aligned(dtype, layout), *odd_problems(dtype, layout)):
        if not _legal(picked, problem):
            picked += _greedy(kernels(problem, level=Level.CORE), _PER_ODD_FAMILY)
    for problem in batched(dtype, layout):
        if not _legal(picked, problem):
            picked += _greedy(kernels(problem, level=Level.CORE), _PER_ODD_FAMILY)
    return tuple(picked)


@cache
def everything() -> tuple[Kernel, ...]:
    """All kernels of all families and kinds, each once."""
    families = [kernel for family in FAMILIES for kernel in chosen(*family)]
    kinds = [kernel for kind in KINDS for dtype in KIND_DTYPES if (kernel := of_kind(kind, dtype))]
    return tuple(dict.fromkeys([*families, *kinds]))


def padded(kernel: Kernel) -> bool:
    """Copies operands that TMA cannot read into workspace before it runs."""
    tma = kernel.backend is Backend.CUTLASS3X and kernel.mainloop in TMA_MAINLOOPS
    return tma and kernel.alignment_a == 1


@cache
def of_kind(kind: str, dtype: DType) -> Kernel | None:
    """One tn kernel of a kind, one that is built already if possible; None if there is none."""
    matches = KINDS[kind]
    for kernel in chosen(dtype, Layout.TN):
        if matches(kernel):
            return kernel
    problems = (aligned(dtype, Layout.TN), *less_aligned(dtype, Layout.TN))
    for level in Level:
        for problem in (*problems, unaligned_operands(dtype, Layout.TN)):
            for kernel in kernels(problem, level=level):
                if matches(kernel):
                    return kernel
    return None


def splits_of(kernel: Kernel) -> tuple[Launch, ...]:
    """The launches that a kind's tests take."""
    if kernel.backend is Backend.CUTE:
        return tuple(map(_split, CLUSTER_SPLITS))
    if kernel.scheduler is TileScheduler.SPLIT_K:
        return tuple(map(_split, EVEN_SPLITS))
    if kernel.scheduler is TileScheduler.STREAM_K:
        return (
            Launch(decomposition=Decomposition.STREAM_K),
            Launch(decomposition=Decomposition.HEURISTIC),
            *map(_split, (2, 5)),
        )
    return (Launch(),)


def suited(kernel: Kernel, m: int, n: int, k: int, *, splits: int = 1) -> Problem:
    """The tn problem m×n×k with N and K rounded up to what the kernel needs, and no further.

    Slices of K that a second kernel adds must be equal; a cluster along K needs a K tile for each
    of its `splits` blocks, so K grows by whole tiles, and its last tile stays as ragged as it was.
    """
    whole = kernel.alignment_a * (splits if kernel.scheduler is TileScheduler.SPLIT_K else 1)
    if kernel.scheduler is TileScheduler.CLUSTER_SPLIT_K:
        depth = kernel.tile[2]
        k += max(0, -(-(splits * depth - k) // depth)) * depth
    return Problem(
        m=m,
        n=-(-n // kernel.alignment_d) * kernel.alignment_d,
        k=-(-k // whole) * whole,
        dtype=kernel.dtype,
        layout=Layout.TN,
    )


def launches_of(kernel: Kernel, problem: Problem, device: DeviceModel) -> list[Launch]:
    """The launches that the space offers; where it offers none, one that the kernel takes."""
    return launches(kernel, problem, device) or [plain_launch(kernel, problem)]


def plain_launch(kernel: Kernel, problem: Problem) -> Launch:
    """A launch that the kernel takes: data-parallel but for those that do nothing but split K."""
    if kernel.scheduler is not TileScheduler.SPLIT_K:
        return Launch()
    halves = _split(2)
    if launch_refusal(kernel, halves, problem) is None:
        return halves
    return Launch(decomposition=Decomposition.SPLIT_K)


def _split(splits: int) -> Launch:
    if splits == 1:
        return Launch()
    return Launch(decomposition=Decomposition.SPLIT_K, splits=splits)


def legal(problem: Problem, most: int = 2) -> list[Kernel]:
    """Chosen kernels that take the problem, of different kinds where there are several."""
    return _greedy(_legal(chosen(problem.dtype, problem.layout), problem), most)


def _legal(among: Iterable[Kernel], problem: Problem) -> list[Kernel]:
    return [kernel for kernel in among if refusal(kernel, problem) is None]


def _greedy(among: Sequence[Kernel], most: int) -> list[Kernel]:
    """Up to `most` kernels, each showing the most feature pairs that those before it did not."""
    left = list(among)
    seen: set[object] = set()
    picked: list[Kernel] = []
    while left and len(picked) < most:
        gains = [len(_pairs(kernel) - seen) for kernel in left]
        best = gains.index(max(gains))
        kernel = left.pop(best)
        seen |= _pairs(kernel)
        picked.append(kernel)
    return picked


@cache
def _pairs(kernel: Kernel) -> frozenset[object]:
    features = (
        ("mainloop", kernel.mainloop),
        ("epilogue", kernel.epilogue),
        ("scheduler", kernel.scheduler),
        ("swapped", kernel.swapped),
        ("fast", kernel.fast_accumulation),
        ("cluster", kernel.cluster),
        ("tile_m", kernel.tile[0]),
        ("automatic", kernel.stages == 0),
    )
    return frozenset([*features, *combinations(features, 2)])
