"""Which candidates to try first by other evidence than the cost model's.

That is winners of near problems, and cuBLAS's own choice: its kernels' names, and our kernels that
are most like them. The names are undocumented; their meaning was read off profiles. `nvjet`'s are
`nvjet_<types>_<M>x<N>_<K>x<stages>_<cluster M>x<N>_<raster>_…_<layout>`, tile and cluster in
cuBLAS's column-major view: our row-major D is its D transposed, so its M runs along our N. (A
product of 16×3584×4096 ran `32x64_64x16_4x1`: a cluster of 4 is of use along 3584 only.) A name
that is not understood gives no hint, and a wrong hint costs the measuring of a few kernels.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, log2

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import AnyKernel, CutlassKernel, MainloopSchedule
from gemmsmith.core.launch import Decomposition
from gemmsmith.core.problem import DType, Problem
from gemmsmith.core.tuning import Effort
from tuner.backends import is_legal
from tuner.backends.cutlass.operation import of_type
from tuner.compile import Builder
from tuner.search.budget import BUDGETS, Budget
from tuner.search.exploration import Field
from tuner.search.finals import top_candidates
from tuner.search.ranking import by_time, predictions
from tuner.store import Store

NEIGHBOURS = 8
"""Near problems whose winners are used: farther ones differ so much that the best tile does too."""

_TWINS: dict[str, str] = {DType.BF16: DType.FP16, DType.FP16: DType.BF16}

HINTS = 6
"""Kernels that a hint puts in front. cuBLAS's names leave the tile's orientation, its depth and the
scheduler open; a few kernels share the tile, any others are only similar. Not measured yet."""

# Penalties in octaves of one tile extent: a tile half as wide differs by 1. They only say that
# these traits matter less than the tile. Not measured yet.
_SPLIT = 0.75  # one splits along K and the other does not: matters most after the tile
_CLUSTER = 0.25  # per octave of a cluster's extent: multicast saves L2 reads, no more
_SCHEDULE = 0.25  # one is cooperative and the other is not
_ACCUMULATION = 0.25  # FP8: the default accumulates fast
_DEPTH = 0.125  # per octave of the tile's K: more stages make up for less depth

_MAX_NAME = 400  # the rest of a long C++ name holds its arguments

_GRANULE = 8  # tensor cores compute multiples of 8 only: anything else was misread

_NUMBER = r"[1-9]\d{0,3}"
_TILE = rf"(?P<m>{_NUMBER})x(?P<n>{_NUMBER})"
_DEPTH_STAGES = rf"(?P<k>{_NUMBER})x(?P<stages>{_NUMBER})"
_FORMS = tuple(
    re.compile(pattern, re.ASCII)
    for pattern in (
        # nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN, nvjet_sm90_hss_64x8_64x16_1x1_h_bz_splitK_NNT
        rf"nvjet_(?:sm\d+_)?[a-z]+_{_TILE}_{_DEPTH_STAGES}"
        rf"_(?P<cluster_m>{_NUMBER})x(?P<cluster_n>{_NUMBER})(?P<rest>\w*)",
        # sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute…
        rf"sm\d+_xmma_gemm_\w*?(?P<layout>[tn]{{2}}_[tn])_tilesize{_TILE}x(?P<k>{_NUMBER})"
        rf"(?:_stages?(?P<stages>{_NUMBER}))?"
        rf"(?:_cgasize(?P<cluster_m>{_NUMBER})x(?P<cluster_n>{_NUMBER})x\d+)?(?P<rest>\w*)",
        # cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_32x3_tn_align1
        rf"cutlass_\d+_\w*?gemm_(?:\w*?_)?{_TILE}(?:_{_DEPTH_STAGES})?_(?P<layout>[tn]{{2}})_align",
        # ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x3_tn
        rf"ampere_\w*?gemm_(?:\w*?_)?{_TILE}_\w*?stages_{_DEPTH_STAGES}_(?P<layout>[tn]{{2}})",
    )
)
_NVJET_LAYOUT = re.compile(r"_([NT]{3})(?:_|$)")
_RASTER = re.compile(r"_([vh])(?:_|$)")
_COOPERATIVE = re.compile(r"_coop([AB])(?:_|$)")
_WARPGROUPS = re.compile(r"warpgroupsize(\d)x(\d)x\d", re.ASCII)
_SPLITTING = re.compile(r"split_?k(?!_off)", re.IGNORECASE)
_REDUCTION = re.compile(r"splitKreduce", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class CublasChoice:
    """What the name of a cuBLAS kernel says, in cuBLAS's column-major orientation.

    Attributes:
        tile: (M, N) of a thread block's tile; M runs along our N.
        depth: K of the tile, in elements; 0 if the name does not say.
        stages: depth of the pipeline; 0 if the name does not say.
        cluster: thread blocks per cluster along (M, N).
        raster: `v` or `h`, the way neighbouring tiles follow each other; "" if not in the name.
        split_k: the product is split along K; another kernel may add the parts.
        cooperative: `A` or `B`, the operand along whose side warpgroups share a tile; "" if they
            do not share one.
        transposed: layout letters of A, B and, where the name says, D: `TNN`, `TN`.
    """

    tile: tuple[int, int]
    depth: int = 0
    stages: int = 0
    cluster: tuple[int, int] = (1, 1)
    raster: str = ""
    split_k: bool = False
    cooperative: str = ""
    transposed: str = ""


def parse(name: str) -> CublasChoice | None:
    """The choice in one kernel's name; None if it is not a matrix product of a known form."""
    name = name[:_MAX_NAME]
    for form in _FORMS:
        match = form.search(name)
        if match is not None:
            choice = _choice(match.groupdict())
            return None if any(extent % _GRANULE for extent in choice.tile) else choice
    return None


def choice_of(names: Iterable[str]) -> CublasChoice | None:
    """What a launch of cuBLAS chose, by the names of its kernels; None if no name is known."""
    names = tuple(names)
    choice = next((choice for choice in map(parse, names) if choice is not None), None)
    if choice is not None and any(_REDUCTION.search(name) for name in names):
        return replace(choice, split_k=True)
    return choice


def _choice(fields: dict[str, str | None]) -> CublasChoice:
    def number(field: str, default: int) -> int:
        return int(fields.get(field) or default)

    rest = fields.get("rest") or ""
    layout = fields.get("layout") or _first(_NVJET_LAYOUT, rest)
    return CublasChoice(
        tile=(number("m", 1), number("n", 1)),
        depth=number("k", 0),
        stages=number("stages", 0),
        cluster=(number("cluster_m", 1), number("cluster_n", 1)),
        raster=_first(_RASTER, rest),
        split_k=_SPLITTING.search(rest) is not None,
        cooperative=_first(_COOPERATIVE, rest) or _shared_by_warpgroups(rest),
        transposed=layout.replace("_", "").upper(),
    )


def _first(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return match.group(1) if match else ""


def _shared_by_warpgroups(rest: str) -> str:
    match = _WARPGROUPS.search(rest)
    if match is None or match.groups() == ("1", "1"):
        return ""
    return "B" if match.group(1) == "1" else "A"


def distance(choice: CublasChoice, candidate: Candidate) -> float:
    """How unlike cuBLAS's choice a candidate is, in octaves of a tile's extent; 0 for the same.

    Tiles and clusters are compared as they lie on the problem, so that a swapped kernel and an
    unswapped one with tile M and N exchanged are equally near.
    """
    kernel = candidate.kernel
    if not isinstance(kernel, CutlassKernel):
        return inf  # it has no tile to compare
    tile_m, tile_n = _on_problem(kernel, (kernel.tile[0], kernel.tile[1]))
    cluster_m, cluster_n = _on_problem(kernel, kernel.cluster)
    # cuBLAS computes Dᵀ = BᵀAᵀ in column-major order: its M is our N.
    (their_n, their_m), (their_cluster_n, their_cluster_m) = choice.tile, choice.cluster
    far = _octaves(tile_m, their_m) + _octaves(tile_n, their_n)
    far += _CLUSTER * (_octaves(cluster_m, their_cluster_m) + _octaves(cluster_n, their_cluster_n))
    if choice.depth:
        far += _DEPTH * _octaves(kernel.tile[2], choice.depth)
    if splits(candidate) != choice.split_k:
        far += _SPLIT
    if (kernel.mainloop is MainloopSchedule.COOPERATIVE) != bool(choice.cooperative):
        far += _SCHEDULE
    if kernel.operation.is_narrow_float and not kernel.fast_accumulation:
        far += _ACCUMULATION
    return far


def splits(candidate: Candidate) -> bool:
    """Whether several thread blocks share an output tile along K."""
    return candidate.launch.decomposition is not Decomposition.DATA_PARALLEL


def hinted(
    candidates: Sequence[Candidate], choice: CublasChoice, limit: int = HINTS
) -> list[Candidate]:
    """The candidates most like cuBLAS's choice, at most `limit`, each of another kernel.

    Among equals, launches of one kernel included, the first in `candidates` comes first: pass them
    ranked.
    """
    nearest: dict[str, Candidate] = {}
    for candidate in sorted(candidates, key=lambda c: distance(choice, c)):  # stable
        if len(nearest) >= limit:
            break
        nearest.setdefault(candidate.kernel.name, candidate)
    return list(nearest.values())


def near_winners(store: Store, problem: Problem, device: str) -> list[Candidate]:
    """Candidates that won near problems and are legal here, nearest first, each once.

    BF16 and FP16 kernels of one shape behave alike: same instruction rate, same bytes. So if the
    other of the two types was tuned, its winners, as kernels of this type, are among them.
    """
    winners = store.near_winners(problem, device, limit=NEIGHBOURS)
    if (twin := _TWINS.get(problem.dtype)) is not None:
        winners += store.near_winners(replace(problem, dtype=twin), device, limit=NEIGHBOURS)
    winners.sort(key=lambda winner: problem.distance(winner.problem))  # stable: own type first
    near: dict[str, Candidate] = {}
    for winner in winners:
        if winner.candidate is None or not isinstance(winner.candidate.kernel, CutlassKernel):
            continue
        kernel, launch = (
            of_type(winner.candidate.kernel, problem.operation.of_kernels.dtype),
            winner.candidate.launch,
        )
        candidate = Candidate(kernel=kernel, launch=launch)
        if is_legal(candidate, problem):
            near.setdefault(candidate.key, candidate)
    return list(near.values())


def field_of(
    candidates: Sequence[Candidate],
    predicted: Mapping[str, float],
    budget: Budget,
    *,
    near: Iterable[Candidate] = (),
    default: Sequence[str] = (),
    built: Collection[str] | None,
) -> Field:
    """The candidates in the order of their predictions, and those to begin with.

    `near` won near problems, `default` are names of cuBLAS's kernels, `built` is as in `Field`.
    """
    order = by_time(candidates, predicted)
    seeds = [candidate for candidate in near if candidate.key in predicted][: budget.seeds]
    first = [*seeds, *resembling(order, default, budget.hints)]
    return Field(order=order, predicted=predicted, first=first, built=built)


def first_kernels(
    problem: Problem,
    candidates: Sequence[Candidate],
    model: DeviceModel,
    *,
    store: Store,
    builder: Builder,
    effort: Effort,
) -> list[AnyKernel]:
    """The kernels that a run of that effort will measure first, in its order; built or not.

    The choice among `candidates` is the run's own, except for what only a GPU shows: which kernels
    resemble cuBLAS's, and how fast the first ones were. A run that then lacks kernels requests
    them.
    """
    budget = BUDGETS[effort]
    if effort is Effort.RECHECK:
        chosen = top_candidates(store, problem, model.slug, candidates, budget.finalists)
    else:
        kernels = {candidate.kernel for candidate in candidates}
        field = field_of(
            candidates,
            predictions(problem, candidates, model),
            budget,
            near=near_winners(store, problem, model.slug),
            built={kernel.name for kernel in kernels if builder.has(kernel)},
        )
        chosen = field.favourites(budget)
    return list(dict.fromkeys(candidate.kernel for candidate in chosen))


def resembling(
    candidates: Sequence[Candidate], kernels: Sequence[str], limit: int = HINTS
) -> list[Candidate]:
    """`hinted` by the names of the kernels that cuBLAS ran; empty if no name is known."""
    choice = choice_of(kernels)
    return [] if choice is None else hinted(candidates, choice, limit)


def _on_problem(kernel: CutlassKernel, extents: tuple[int, int]) -> tuple[int, int]:
    return (extents[1], extents[0]) if kernel.swapped else extents


def _octaves(ours: int, theirs: int) -> float:
    return abs(log2(ours / theirs))
