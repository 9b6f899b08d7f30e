"""Launches of parts of a problem among other things: the parts must keep their bits.

Rows are computed again among others: fewer rows and more, in another order, some twice, and with
rows of zeros after them. If a problem is grouped by rows, they keep their group, and are spread
anew: a token is alone in its group, all tokens are in one, groups become empty, others lie before
and after, and the rows of zeros belong to no group. If it is grouped by depth, a group keeps its
tokens in their order, while the groups before and after it change or are empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

import torch

from gemmsmith.core.operation import Grouping
from gemmsmith.core.problem import Problem
from tuner.workloads.operands import Indices, Operands, bits
from tuner.workloads.workload import Groups, OperandSet, drawn_with

FEWEST = 192
"""Rows of the largest launch, at least: a problem of few rows is computed among more, too."""

_ZEROS = (0, 3, 0, 8, 1, 0)
"""Rows of zeros after those of each launch."""

_SHARES = (1.0, 0.5, 1.0, 0.0, 0.5, 1.0)
"""Share of the groups, at least one, whose rows each launch takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Relaunch:
    """A launch that computes parts of a problem again.

    Attributes:
        problem, operands: what is launched.
        at: where the parts are in the launch's outputs, each [matrices, rows, columns].
        of: where they are in the whole problem's.
        parts: the parts and the launch, for messages.
        cause: what bits depend on if they differ, for messages.
    """

    problem: Problem
    operands: OperandSet
    at: Indices
    of: Indices
    parts: str
    cause: str


def whole(operands: Operands) -> OperandSet:
    """The operands of the problem's own launch; of groups, a launch in which their sizes differ."""
    return operands.cases[1 if operands.problem.operation.is_grouped else 0].operands


def relaunches(
    operands: Operands, alignment_a: int, generator: torch.Generator
) -> Iterator[Relaunch]:
    """Launches for a kernel with this alignment of A. The generator is the host's."""
    by_depth = operands.problem.operation.grouping is Grouping.DEPTH
    # A's contiguous elements are copied by as many at once.
    is_contiguous = operands.problem.layout.a_row_major is by_depth
    multiple = lcm(alignment_a, 8) if is_contiguous else 1
    return (_of_groups if by_depth else _of_rows)(operands, multiple, generator)


def _of_rows(operands: Operands, multiple: int, generator: torch.Generator) -> Iterator[Relaunch]:
    problem, source, m = operands.problem, whole(operands), operands.problem.m
    owners = torch.zeros(m, dtype=torch.long)
    if source.groups is not None:
        owners = torch.searchsorted(torch.tensor(source.groups.ends), torch.arange(m), right=True)
    most = max(m, FEWEST)
    counts = sorted({min(count, most) for count in (1, min(m, 7), 33, 130, m // 2 + 1, most)})
    for count, zeros, share in zip(counts, _ZEROS, _SHARES, strict=False):
        among = _rows_of_some(owners, share, generator)
        # Random rows, some of them twice if there are fewer.
        drawn = torch.randperm(max(len(among), count), generator=generator)[:count] % len(among)
        rows = among[drawn]
        rows = rows[owners[rows].argsort(stable=True)]
        size = _rounded(count + zeros, multiple)
        placed = rows.to(source.a.device)
        launched = _with_rows(operands, placed, size)
        if source.groups is not None:
            sizes = owners[rows].bincount(minlength=problem.batch)
            launched = replace(launched, groups=_spread(source.groups, sizes))
        yield Relaunch(
            problem=replace(problem, m=size),
            operands=launched,
            at=(slice(None), slice(count)),
            of=(slice(None), placed),
            parts=f"{count} rows differ in a launch of {size} rows from those in one of {m}",
            cause="M or on the row" if source.groups is None else "the spread of tokens",
        )


def _of_groups(operands: Operands, multiple: int, generator: torch.Generator) -> Iterator[Relaunch]:
    problem, source = operands.problem, whole(operands)
    groups = drawn_with(source.groups)
    runs, device = groups.runs, source.a.device
    for count, zeros in ((1, 1), (-(-len(runs) // 2), 3), (len(runs), 0)):
        # Group of[i] becomes group at[i].
        of, at = (torch.randperm(len(runs), generator=generator)[:count] for _ in range(2))
        at = at.sort().values
        kept = [torch.arange(runs[group].start, runs[group].stop) for group in of.tolist()]
        sizes = torch.zeros(len(runs), dtype=torch.long)
        sizes[at] = torch.tensor([len(tokens) for tokens in kept])
        tokens = torch.cat(kept).to(device)
        size = _rounded(len(tokens) + zeros, multiple)
        here = replace(problem, k=size)
        at, of = at.to(device), of.to(device)
        d = torch.empty_like(source.d)
        operands.ready_parts(d, (at,), (of,))
        factors: dict[str, Any] = {
            name: torch.ones_like(factor).index_copy_(0, at, factor[of])
            for name in ("scale_a", "scale_b")
            if (factor := getattr(source, name)) is not None
        }
        yield Relaunch(
            problem=here,
            operands=replace(
                source,
                a=_chosen(source.a, 2, tokens, size, row_major=problem.layout.a_row_major),
                b=_chosen(source.b, 1, tokens, size, row_major=problem.layout.b_row_major),
                d=d,
                groups=_spread(groups, sizes),
                **factors,
            ),
            at=(at,),
            of=(of,),
            parts=f"{count} of {len(runs)} groups differ in a launch of {size} tokens from those "
            f"in one of {problem.k}",
            cause="other groups' tokens",
        )


def _rows_of_some(owners: torch.Tensor, share: float, generator: torch.Generator) -> torch.Tensor:
    """The rows of a random share of the groups that have rows."""
    present = owners.bincount().nonzero().view(-1)
    order = torch.randperm(len(present), generator=generator)
    kept = present[order[: max(1, round(share * len(present)))]]
    return torch.isin(owners, kept).nonzero().view(-1)


def _spread(like: Groups, sizes: torch.Tensor) -> Groups:
    """Groups of these sizes, on the device of `like`."""
    ends = sizes.cumsum(0)
    offsets = ends.to(like.offsets)
    return Groups(spread="anew", ends=tuple(ends.tolist()), offsets=offsets)


def _with_rows(operands: Operands, rows: torch.Tensor, size: int) -> OperandSet:
    """Operands of `size` rows: copies of these, then rows of zeros."""
    problem, source = operands.problem, whole(operands)
    matrices, _, columns = source.d.shape
    if source.d.stride(0) < source.d.stride(1):  # the matrices' rows alternate
        d = source.d.new_empty((size, matrices, columns)).transpose(0, 1)
    else:
        d = source.d.new_empty((matrices, size, columns))
    operands.ready_parts(d, (slice(None), slice(len(rows))), (slice(None), rows))
    chosen: dict[str, Any] = {
        name: _chosen(operand, 1, rows, size)
        for name in ("residual", "aux", "row_scale", "scale_a")
        if (operand := getattr(source, name)) is not None and operand.dim() == 3
    }
    if (sums := source.row_gradient) is not None:
        chosen["row_gradient"] = sums.new_empty((size, sums.shape[1]))
    a = _chosen(source.a, 1, rows, size, row_major=problem.layout.a_row_major)
    return replace(source, a=a, d=d, **chosen)


def _chosen(
    operand: torch.Tensor, dim: int, indices: torch.Tensor, size: int, *, row_major: bool = True
) -> torch.Tensor:
    """These rows (dim 1) or columns (dim 2) of an operand, then zeros: `size` in all."""
    source = bits(operand)
    shape = [size if i == dim else extent for i, extent in enumerate(source.shape)]
    if row_major:
        padded = source.new_zeros(shape)
    else:
        padded = source.new_zeros((shape[0], shape[2], shape[1])).transpose(1, 2)
    padded.narrow(dim, 0, len(indices)).copy_(source.index_select(dim, indices))
    return padded.view(operand.dtype)


def _rounded(size: int, multiple: int) -> int:
    return size + -size % multiple
