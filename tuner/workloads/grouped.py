"""Grouped products (mixture of experts): rows of tokens times each expert's weight, and each
expert's weight gradient.

The operands are those of the same products without groups; an A or B that the groups share is one
matrix. Sets differ in how the tokens are divided: they rotate over the spreads of `spreads`. If a
single set exceeds the L2 cache, sets with different groups share their memory. If there are fewer
tokens than groups, a launch reads only as many groups' weights as there are tokens, so there are
more sets, until all weights are read.

One set of each spread is verified, and one set whose last tokens belong to no group: D must keep
its contents in their rows. Every group's weight gradient is judged by itself, because its sum has
as many terms as the group has tokens. The gradient of an empty group is zero, or unchanged if it is
accumulated into. Tolerances are those of the operation without groups; by depth, of a sum over all
tokens.

Tokens of FP8 gradients lie side by side, so groups start at multiples of 16 bytes, as programs pad
them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from gemmsmith.core.operation import Grouping, Operation, Scaling
from gemmsmith.core.problem import Problem
from gemmsmith.runtime.abi import Arguments
from tuner.workloads import grouped_ways
from tuner.workloads.dense import Dense
from tuner.workloads.footprint import MAX_SETS
from tuner.workloads.matrices import SIGMA, draw_matrices, fill, packed_arguments, unit_scale
from tuner.workloads.scaled import ROW_FACTORS, Scaled, factors, set_factors, with_row_factors
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
"""The name of the set whose last tokens belong to no group."""


class Grouped:
    """16-bit products, and FP8 products with factors of rows, by rows and by depth."""

    def covers(self, operation: Operation) -> bool:
        known = operation.scaling in (Scaling.NONE, Scaling.ROW)
        return operation.is_grouped and known and not operation.is_fused

    def draw(self, problem: Problem, count: int, source: RandomSource) -> Drawn:
        """Sets that share the memory of `count` sets, and alternate between the spreads."""
        operation = problem.operation
        memory, check, sigma = _memory(problem, count, source)
        start = None
        if operation.accumulate:
            start = torch.empty_like(check)
            for d in (start, *(s.d for s in memory)):
                fill(d, operation.d, 1.0, source)
        sets = []
        # Spreads alternate; the draw's number rises when each spread has been used.
        for i in range(_rotation(problem, count)):
            spread = _SPREADS[i % len(_SPREADS)]
            sets.append(
                _divided(memory[i % count], spread, ends_of(problem, spread, i // len(_SPREADS)))
            )
        ends = short_ends(problem, source.generator.initial_seed())
        verified = (*sets[: len(_SPREADS)], _divided(memory[0], SHORT, ends))
        cases = tuple(_case(problem, operands, sigma) for operands in verified)
        mean = math.hypot(*cases[0].sigmas) / math.sqrt(len(cases[0].sigmas))
        return Drawn(sets=tuple(sets), check=check, start=start, sigma=mean, cases=cases)

    def arguments(self, problem: Problem, operands: OperandSet, d: torch.Tensor) -> Arguments:
        """Arguments for the C ABI, with output `d`. Matrices that groups share have stride 0."""
        arguments = packed_arguments(problem, operands, d)
        arguments.offsets = drawn_with(operands.groups).offsets.data_ptr()
        arguments.batch_stride_a = 0
        if problem.operation.grouping is Grouping.ROWS:
            arguments.batch_stride_c = arguments.batch_stride_d = 0
        else:
            arguments.batch_stride_b = 0
        if problem.operation.is_scaled:
            set_factors(arguments, problem, operands)
        return arguments

    def precision(self, problem: Problem) -> torch.dtype:
        return _ungrouped(problem).precision(problem)

    def product(self, problem: Problem, operands: OperandSet, block: Block) -> torch.Tensor:
        by_rows = problem.operation.grouping is Grouping.ROWS
        return (_by_rows if by_rows else _by_depth)(operands, block, self.precision(problem))

    def tolerance(self, problem: Problem, *, fast_accumulation: bool) -> Tolerance:
        return _ungrouped(problem).tolerance(problem, fast_accumulation=fast_accumulation)

    def defaults(self, problem: Problem) -> Sequence[Way]:
        return grouped_ways.defaults(problem)

    def alternatives(self, problem: Problem) -> Sequence[Way]:
        return grouped_ways.alternatives(problem)


_SPREADS = tuple(Spread)


def _memory(
    problem: Problem, count: int, source: RandomSource
) -> tuple[tuple[OperandSet, ...], torch.Tensor, float]:
    """`count` sets without groups, one more output, and D's standard deviation per √terms.

    D's standard deviation is near 1; by depth, that of a group with an equal share of the tokens.
    """
    operation = problem.operation
    by_rows = operation.grouping is Grouping.ROWS
    scale = unit_scale(problem.k if by_rows else -(-problem.k // problem.batch))
    if not operation.is_scaled:
        sets, check = draw_matrices(problem, count, source, 1.0, scale)
        return sets, check, scale
    sets, check = draw_matrices(problem, count, source, SIGMA[operation.a], SIGMA[operation.b])
    return with_row_factors(problem, sets, scale, source), check, scale * ROW_FACTORS


def _rotation(problem: Problem, count: int) -> int:
    """Number of sets with which every spread uses every memory, and all weights are read."""
    whole = math.lcm(count, len(_SPREADS))
    repeats = 1
    if problem.operation.grouping is Grouping.ROWS:
        repeats = -(-problem.batch // min(problem.batch, tokens_of(problem)))
    return whole * max(1, min(repeats, MAX_SETS // whole))


def _divided(operands: OperandSet, name: str, ends: tuple[int, ...]) -> OperandSet:
    offsets = torch.tensor(ends, dtype=torch.int32, device=operands.d.device)
    return replace(operands, groups=Groups(spread=str(name), ends=ends, offsets=offsets))


def _case(problem: Problem, operands: OperandSet, sigma: float) -> Case:
    """The case of a set; `sigma` is D's standard deviation per √terms."""
    groups = drawn_with(operands.groups)
    if problem.operation.grouping is Grouping.ROWS:
        written, terms = groups.ends[-1], [problem.k]
    else:
        # An empty group is judged as if it had one token.
        written, terms = problem.m, [max(1, run.stop - run.start) for run in groups.runs]
    initial = 1.0 if problem.operation.accumulate else 0.0
    return Case(
        operands=operands,
        written=written,
        sigmas=tuple(math.hypot(initial, sigma * math.sqrt(count)) for count in terms),
        name=groups.spread,
    )


def _by_rows(operands: OperandSet, block: Block, precision: torch.dtype) -> torch.Tensor:
    a = operands.a[0, block.rows]
    b = operands.b[:, :, block.columns]
    # Rows of tokens without a group stay zero.
    product = torch.zeros((1, len(a), b.shape[2]), dtype=precision, device=a.device)
    first, last = block.rows.start, block.rows.stop
    for group, run in enumerate(drawn_with(operands.groups).runs):
        rows = slice(max(run.start, first) - first, min(run.stop, last) - first)
        if rows.start < rows.stop:
            part = torch.mm(a[rows].to(precision), b[group].to(precision), out=product[0, rows])
            if operands.scale_b is not None:
                part.mul_(operands.scale_b[group, :, block.columns])
    return product if operands.scale_a is None else product.mul_(operands.scale_a[:, block.rows])


def _by_depth(operands: OperandSet, block: Block, precision: torch.dtype) -> torch.Tensor:
    a, b = operands.a[0, block.rows], operands.b[0, :, block.columns]
    runs = drawn_with(operands.groups).runs[block.batches]
    products = torch.stack([a[:, run].to(precision) @ b[run].to(precision) for run in runs])
    if operands.scale_a is not None:
        scale_a, scale_b = factors(operands)
        products.mul_(scale_a[block.batches, block.rows])
        products.mul_(scale_b[block.batches, :, block.columns])
    return products


def _ungrouped(problem: Problem) -> Workload:
    return Scaled() if problem.operation.is_scaled else Dense()
