"""The library's algorithms for a product, as the pack lists them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from gemmsmith.core.launch import Algorithm
from gemmsmith.core.operation import Scaling
from gemmsmith.core.problem import Problem
from gemmsmith.errors import LaunchFailed
from gemmsmith.runtime.abi import SCALING_CODES, Arguments, status_text
from gemmsmith.runtime.pack import LoadedKernel

MOST_PROPOSALS = 128
"""Asked of the heuristics, which have given eight at most (cuBLAS 13.1, H200)."""
MOST_VARIANTS = 4096
"""Asked of the neighbours: more than any start has had room for is a list without an end."""


_SOMEWHERE = 1 << 20
"""An address that is aligned as any allocation is."""


_CONFIGURED = (
    "id",
    "tile_id",
    "split_k",
    "stages_id",
    "cluster_id",
    "inner_shape",
    "custom",
    "reduction",
    "swizzle",
)


class RawProposal(ctypes.Structure):
    """`gs_proposal` of cublaslt/proposal.h."""

    _fields_ = [
        ("algorithm", ctypes.c_uint64 * 8),
        ("library_version", ctypes.c_uint64),
        ("workspace_bytes", ctypes.c_int64),
        ("id", ctypes.c_int32),
        ("tile_id", ctypes.c_int32),
        ("stages_id", ctypes.c_int32),
        ("cluster_id", ctypes.c_int32),
        ("inner_shape", ctypes.c_int32),
        ("custom", ctypes.c_int32),
        ("split_k", ctypes.c_int32),
        ("reduction", ctypes.c_int32),
        ("swizzle", ctypes.c_int32),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int32 * 2),
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """One algorithm of one version of the library; the rest is the library's own numbering.

    Attributes:
        workspace_bytes: what it needs, and is given.
        reduction: how slices of K are added up; 0: not split.
        waves: how often it fills the device.
    """

    algorithm: tuple[int, ...]
    library_version: int
    workspace_bytes: int
    id: int
    tile_id: int
    stages_id: int
    cluster_id: int
    inner_shape: int
    custom: int
    split_k: int
    reduction: int
    swizzle: int
    waves: float

    @property
    def chosen(self) -> Algorithm:
        """The algorithm as a launch has it."""
        return Algorithm.of(self.library_version, self.algorithm, self.workspace_bytes)

    def launch(self, arguments: Arguments) -> None:
        """Make these the algorithm and workspace of a launch."""
        arguments.set_algorithm(self.library_version, self.algorithm, self.workspace_bytes)


def shape_of(problem: Problem, ordinal: int, sm_count: int) -> Arguments:
    """The arguments of a densely laid out product, as far as choosing an algorithm needs them.

    Addresses stand for operands: nothing reads them.
    """
    operation = problem.operation
    by_row = operation.scaling is Scaling.ROW
    scale = _SOMEWHERE if operation.is_scaled else None
    return Arguments(
        m=problem.m,
        n=problem.n,
        k=problem.k,
        batch=problem.batch,
        a=_SOMEWHERE,
        b=_SOMEWHERE,
        c=_SOMEWHERE,
        d=_SOMEWHERE,
        lda=problem.contiguous_a,
        ldb=problem.contiguous_b,
        ldc=problem.n,
        ldd=problem.n,
        batch_stride_a=problem.m * problem.k,
        batch_stride_b=problem.k * problem.n,
        batch_stride_c=problem.m * problem.n,
        batch_stride_d=problem.m * problem.n,
        alpha=1.0,
        beta=1.0 if operation.accumulate else 0.0,
        scale_a=scale,
        scale_b=scale,
        scaling=SCALING_CODES[Scaling.ROW if by_row else Scaling.NONE],
        device=ordinal,
        sm_count=sm_count,
        swizzle=1,
        splits=1,
    )


def propose(
    kernel: LoadedKernel, arguments: Arguments, *, most: int = MOST_PROPOSALS
) -> list[Proposal]:
    """The heuristics' whole list, their best guess first; empty where the library has none.

    Args:
        kernel: of the library's pack.
        arguments: the product; its `workspace_limit` is what a proposal may need, 0: 32 MiB.
        most: proposals asked for.

    Raises:
        LaunchFailed: the arguments are wrong, or there is no library or no device.
    """
    return _listed(kernel, "gs_propose", arguments, most)


def variants(
    kernel: LoadedKernel, arguments: Arguments, start: Algorithm, *, most: int = MOST_VARIANTS
) -> list[Proposal]:
    """Other algorithms that the library would run, without `start` itself.

    What changes one thing of it comes before what changes two, and of what changes equally many
    every kind of change has its turn: the first few are a fair sample of the neighbourhood.

    Args:
        kernel: of the library's pack.
        arguments: as for `propose`.
        start: where to begin, usually the fastest proposal.
        most: variants asked for.

    Raises:
        LaunchFailed: as for `propose`, or the start is another version's.
    """
    asked = Arguments.from_buffer_copy(arguments)
    asked.set_algorithm(start.library, start.words, arguments.workspace_limit)
    found = _listed(kernel, "gs_variants", asked, MOST_VARIANTS)
    return _spread(found[0], found[1:])[:most] if found else []


def _spread(start: Proposal, found: Sequence[Proposal]) -> list[Proposal]:
    """`found` by how many things each changes of `start`, the kinds of change in turn."""
    kinds: dict[tuple[str, ...], list[Proposal]] = {}
    for each in found:
        changed = tuple(name for name in _CONFIGURED if getattr(each, name) != getattr(start, name))
        if "split_k" in changed:  # how slices are added up goes with their number
            changed = tuple(name for name in changed if name != "reduction")
        kinds.setdefault(changed, []).append(each)
    spread: list[Proposal] = []
    for far in sorted({("id" in changed, len(changed)) for changed in kinds}):
        alike = [
            group for changed, group in kinds.items() if ("id" in changed, len(changed)) == far
        ]
        turns = zip_longest(*alike)
        spread += [each for turn in turns for each in turn if each is not None]
    return spread


def _listed(kernel: LoadedKernel, name: str, arguments: Arguments, most: int) -> list[Proposal]:
    found, count = (RawProposal * most)(), ctypes.c_int32()
    function: Any = getattr(kernel.pack.library, name)
    kernel.fit(arguments)
    status = function(
        kernel.index, ctypes.byref(arguments), ctypes.c_int32(most), found, ctypes.byref(count)
    )
    if status != 0:
        raise LaunchFailed(f"{kernel.name} lists no algorithms: {status_text(status)}", status)
    return [_proposal(raw) for raw in found[: count.value]]


def _proposal(raw: RawProposal) -> Proposal:
    return Proposal(
        algorithm=tuple(raw.algorithm),
        library_version=raw.library_version,
        workspace_bytes=raw.workspace_bytes,
        id=raw.id,
        tile_id=raw.tile_id,
        stages_id=raw.stages_id,
        cluster_id=raw.cluster_id,
        inner_shape=raw.inner_shape,
        custom=raw.custom,
        split_k=raw.split_k,
        reduction=raw.reduction,
        swizzle=raw.swizzle,
        waves=raw.waves,
    )
