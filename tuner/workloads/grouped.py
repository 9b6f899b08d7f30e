"""Grouped products (mixture of experts): rows of tokens times each expert's weight, and each
expert's weight gradient.

Operands are those of the same products without groups, one A or B for all groups where they share
it. Only how the tokens are divided differs from set to set: sets rotate over the spreads of
`spreads`, and hold different groups in the same memory where one set alone leaves L2 cold. Where
there are fewer tokens than groups, only so many groups' weights are read; there are more sets then,
until all were.

Verified is a set of each spread, and one whose last tokens belong to no group: D keeps what it held
in their rows. Each group's weight gradient is judged by itself: its sum has as many terms as the
group has tokens. An empty group's is zero, or what it was where it is added to. Tolerances are
those of the same operation without groups, of sums over all tokens by depth.

FP8 gradients lie with their tokens side by side, so groups start at multiples of 16 bytes, as
programs pad them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from gemmsmith.core.operation import Grouping, Operation, Scaling
from gemmsmith.core.problem import Problem
from gemmsmith.runtime.abi import SCALING_CODES, Arguments
from tuner.workloads import grouped_ways
from tuner.workloads.dense import Dense
from tuner.workloads.footprint import MAX_SETS
from tuner.workloads.matrices import (
    FACTOR_SPREAD,
    SIGMA,
    draw_factors,
    draw_matrices,
    fill,
    packed_arguments,
    unit_scale,
)
from tuner.workloads.scaled import Scaled, factors
from tuner.workloads.spreads import Spread, ends_of, short_ends, tokens_of
from tuner.workloads.workload import (
    Block,
    Case,
    Drawn,
    Groups,
    OperandSet,
    RandomSource,
    Tolerance,
    Way,
    Workload,
    drawn_with,
)

SHORT = "short"
"""The name of groups that leave tokens over."""


class Grouped:
    """16-bit products and FP8 ones with factors of rows, by rows and by depth."""

    def covers(self, operation: Operation) -> bool:
        """Whether the operation is of this family."""
        known = operation.scaling in (Scaling.NONE, Scaling.ROW)
        return operation.is_grouped and known and not operation.is_fused

    def draw(self, problem: Problem, count: int, source: RandomSource) -> Drawn:
        """Sets in memory for `count`: a multiple of the number of spreads, in turn."""
        operation = problem.operation
        memory, check, sigma = _memory(problem, count, source)
        start = None
        if operation.accumulate:
            start = torch.empty_like(check)
            for d in (start, *(s.d for s in memory)):
                fill(d, operation.d, 1.0, source)
        sets = []
        for i in range(_rotation(problem, count)):
            spread = _SPREADS[i % len(_SPREADS)]
            sets.append(
                _divided(memory[i % count], spread, ends_of(problem, spread, i // len(_SPREADS)))
            )
        ends = short_ends(problem, source.generator.initial_seed())
        verified = (*sets[: len(_SPREADS)], _divided(memory[0], SHORT, ends))
        cases = tuple(_case(problem, each, sigma) for each in verified)
        mean = math.hypot(*cases[0].sigmas) / math.sqrt(len(cases[0].sigmas))
        return Drawn(sets=tuple(sets), check=check, start=start, sigma=mean, cases=cases)

    def arguments(self, problem: Problem, operands: OperandSet, d: torch.Tensor) -> Arguments:
        """The C ABI's arguments of a set with output `d`; what groups share has no stride."""
        arguments = packed_arguments(problem, operands, d)
        arguments.offsets = drawn_with(operands.groups).offsets.data_ptr()
        arguments.batch_stride_a = 0
        if problem.operation.grouping is Grouping.ROWS:
            arguments.batch_stride_c = arguments.batch_stride_d = 0
        else:
            arguments.batch_stride_b = 0
        if problem.operation.is_scaled:
            scale_a, scale_b = factors(operands)
            arguments.scaling = SCALING_CODES[problem.operation.scaling]
            arguments.scale_a, arguments.scale_b = scale_a.data_ptr(), scale_b.data_ptr()
            by_depth = problem.operation.grouping is Grouping.DEPTH
            arguments.batch_stride_scale_a = problem.m if by_depth else 0
            arguments.batch_stride_scale_b = problem.n
        return arguments

    def precision(self, problem: Problem) -> torch.dtype:
        """As without groups."""
        return _ungrouped(problem).precision(problem)

    def product(self, problem: Problem, operands: OperandSet, block: Block) -> torch.Tensor:
        """That block of every group's product."""
        by_rows = problem.operation.grouping is Grouping.ROWS
        return (_by_rows if by_rows else _by_depth)(operands, block, self.precision(problem))

    def tolerance(self, problem: Problem, *, fast_accumulation: bool) -> Tolerance:
        """As without groups."""
        return _ungrouped(problem).tolerance(problem, fast_accumulation=fast_accumulation)

    def defaults(self, problem: Problem) -> Sequence[Way]:
        """The grouped call, or a loop over the groups where that is refused."""
        return grouped_ways.defaults(problem)

    def alternatives(self, problem: Problem) -> Sequence[Way]:
        """The loop, of a program that knows the groups' ends on the host, and others."""
        return grouped_ways.alternatives(problem)


_SPREADS = tuple(Spread)


def _memory(
    problem: Problem, count: int, source: RandomSource
) -> tuple[tuple[OperandSet, ...], torch.Tensor, float]:
    """`count` sets, their groups left out; one more output; D's spread for every root of a term.

    D has a standard deviation near 1, by depth that of a group with its share of the tokens.
    """
    operation = problem.operation
    by_rows = operation.grouping is Grouping.ROWS
    scale = unit_scale(problem.k if by_rows else -(-problem.k // problem.batch))
    if not operation.is_scaled:
        sets, check = draw_matrices(problem, count, source, 1.0, scale)
        return sets, check, scale
    sigma_a, sigma_b = SIGMA[operation.a], SIGMA[operation.b]
    sets, check = draw_matrices(problem, count, source, sigma_a, sigma_b)
    rows = (problem.matrices[2], problem.m, 1)
    columns = (problem.batch, 1, problem.n)
    sets = tuple(
        replace(
            s,
            scale_a=draw_factors(rows, 1.0 / sigma_a, source),
            scale_b=draw_factors(columns, scale / sigma_b, source),
        )
        for s in sets
    )
    # Of exp(s·N) the mean square is exp(2·s²), and there are two.
    return sets, check, scale * math.exp(2 * FACTOR_SPREAD**2)


def _rotation(problem: Problem, count: int) -> int:
    """Sets for which every spread meets every memory, and all weights are read."""
    whole = math.lcm(count, len(_SPREADS))
    repeats = 1
    if problem.operation.grouping is Grouping.ROWS:
        repeats = -(-problem.batch // min(problem.batch, tokens_of(problem)))
    return whole * max(1, min(repeats, MAX_SETS // whole))


def _divided(operands: OperandSet, name: str, ends: tuple[int, ...]) -> OperandSet:
    offsets = torch.tensor(ends, dtype=torch.int32, device=operands.d.device)
    return replace(operands, groups=Groups(spread=str(name), ends=ends, offsets=offsets))


def _case(problem: Problem, operands: OperandSet, sigma: float) -> Case:
    """What a set's output is to be; `sigma` is its spread for every root of a term."""
    groups = drawn_with(operands.groups)
    if problem.operation.grouping is Grouping.ROWS:
        written, terms = groups.ends[-1], [problem.k]
    else:
        # An empty group is judged as if it had a token.
        written, terms = problem.m, [max(1, run.stop - run.start) for run in groups.runs]
    at_first = 1.0 if problem.operation.accumulate else 0.0
    return Case(
        operands=operands,
        written=written,
        sigmas=tuple(math.hypot(at_first, sigma * math.sqrt(each)) for each in terms),
        name=groups.spread,
    )


def _by_rows(operands: OperandSet, block: Block, precision: torch.dtype) -> torch.Tensor:
    """Rows that are no group's are zero."""
    a = operands.a[0, block.rows]
    b = operands.b[:, :, block.columns]
    found = torch.zeros((1, len(a), b.shape[2]), dtype=precision, device=a.device)
    first, last = block.rows.start, block.rows.stop
    for group, run in enumerate(drawn_with(operands.groups).runs):
        rows = slice(max(run.start, first) - first, min(run.stop, last) - first)
        if rows.start < rows.stop:
            part = torch.mm(a[rows].to(precision), b[group].to(precision), out=found[0, rows])
            if operands.scale_b is not None:
                part.mul_(operands.scale_b[group, :, block.columns])
    return found if operands.scale_a is None else found.mul_(operands.scale_a[:, block.rows])


def _by_depth(operands: OperandSet, block: Block, precision: torch.dtype) -> torch.Tensor:
    a, b = operands.a[0, block.rows], operands.b[0, :, block.columns]
    runs = drawn_with(operands.groups).runs[block.batches]
    found = torch.stack([a[:, run].to(precision) @ b[run].to(precision) for run in runs])
    if operands.scale_a is not None:
        scale_a, scale_b = factors(operands)
        found.mul_(scale_a[block.batches, block.rows])
        found.mul_(scale_b[block.batches, :, block.columns])
    return found


def _ungrouped(problem: Problem) -> Workload:
    """The family of the same operation without groups, but for its scaling."""
    return Scaled() if problem.operation.is_scaled else Dense()
