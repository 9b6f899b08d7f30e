"""The library's algorithms for a product, as the compiled pack lists them."""

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
"""Proposals that the heuristics may give; they gave at most eight (cuBLAS 13.1, H200)."""
MOST_VARIANTS = 4096
"""Variants that one algorithm may have; more than any had."""

_ALIGNED_ADDRESS = 1 << 20
"""A placeholder with the alignment of any allocation; it is never read."""

_SETTINGS = (
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
    """`gs_proposal` of `cublaslt/proposal.h`."""

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
    """One algorithm of one version of the library, and its settings in the library's own numbers.

    Attributes:
        workspace_bytes: bytes of workspace that it needs and gets.
        reduction: how slices of K are added; 0 if K is not split.
        waves: how many times its thread blocks fill the device.
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
        return Algorithm.of(self.library_version, self.algorithm, self.workspace_bytes)

    def launch(self, arguments: Arguments) -> None:
        arguments.set_algorithm(self.library_version, self.algorithm, self.workspace_bytes)


def shape_of(problem: Problem, ordinal: int, sm_count: int) -> Arguments:
    """The arguments of a product with dense operands, as far as a choice of algorithm needs them.

    Their addresses are placeholders.
    """
    operation = problem.operation
    by_row = operation.scaling is Scaling.ROW
    scale = _ALIGNED_ADDRESS if operation.is_scaled else None
    return Arguments(
        m=problem.m,
        n=problem.n,
        k=problem.k,
        batch=problem.batch,
        a=_ALIGNED_ADDRESS,
        b=_ALIGNED_ADDRESS,
        c=_ALIGNED_ADDRESS,
        d=_ALIGNED_ADDRESS,
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
    """The proposals of the library's heuristics, the best guess first; may be empty.

    Args:
        kernel: a kernel of the library's pack.
        arguments: the product. `workspace_limit` bounds a proposal's workspace; 0 means 32 MiB.
        most: the most proposals to return.

    Raises:
        LaunchFailed: the arguments are wrong, or there is no library or no device.
    """
    return _listed(kernel, "gs_propose", arguments, most)


def variants(
    kernel: LoadedKernel, arguments: Arguments, start: Algorithm, *, most: int = MOST_VARIANTS
) -> list[Proposal]:
    """Other algorithms that the library can run, ordered by their distance from `start`.

    Variants with one changed setting come before those with two, and so on. At the same distance,
    the kinds of change alternate, so that the first few variants are a fair sample.

    Args:
        kernel: a kernel of the library's pack.
        arguments: as for `propose`.
        start: the algorithm to vary, usually the fastest proposal; not among the results.
        most: the most variants to return.

    Raises:
        LaunchFailed: as for `propose`, or `start` is of another version of the library.
    """
    varied = Arguments.from_buffer_copy(arguments)
    varied.set_algorithm(start.library, start.words, arguments.workspace_limit)
    variants = _listed(kernel, "gs_variants", varied, MOST_VARIANTS)  # the first is `start`
    return _by_distance(variants[0], variants[1:])[:most] if variants else []


def first_variant(kernel: LoadedKernel, arguments: Arguments, start: Algorithm) -> Proposal | None:
    """`start` itself, if the library runs it, with its workspace; else another algorithm or None.

    Raises:
        LaunchFailed: as for `variants`.
    """
    varied = Arguments.from_buffer_copy(arguments)
    varied.set_algorithm(start.library, start.words, arguments.workspace_limit)
    return next(iter(_listed(kernel, "gs_variants", varied, 1)), None)


def _by_distance(start: Proposal, variants: Sequence[Proposal]) -> list[Proposal]:
    by_change: dict[tuple[str, ...], list[Proposal]] = {}
    for variant in variants:
        changed = tuple(
            name for name in _SETTINGS if getattr(variant, name) != getattr(start, name)
        )
        if "split_k" in changed:  # the reduction follows from the number of slices
            changed = tuple(name for name in changed if name != "reduction")
        by_change.setdefault(changed, []).append(variant)
    ordered: list[Proposal] = []
    # Another `id` is another algorithm altogether: farther away than any change of its settings.
    for distance in sorted({("id" in changed, len(changed)) for changed in by_change}):
        groups = [
            group
            for changed, group in by_change.items()
            if ("id" in changed, len(changed)) == distance
        ]
        turns = zip_longest(*groups)
        ordered += [variant for turn in turns for variant in turn if variant is not None]
    return ordered


def _listed(kernel: LoadedKernel, name: str, arguments: Arguments, most: int) -> list[Proposal]:
    proposals, count = (RawProposal * most)(), ctypes.c_int32()
    function: Any = getattr(kernel.pack.library, name)
    kernel.fit(arguments)
    status = function(
        kernel.index, ctypes.byref(arguments), ctypes.c_int32(most), proposals, ctypes.byref(count)
    )
    if status != 0:
        raise LaunchFailed(f"{kernel.name} lists no algorithms: {status_text(status)}", status)
    return [_proposal(raw) for raw in proposals[: count.value]]


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
