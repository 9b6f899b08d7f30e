"""FP8 products with one factor per operand, or one per row of A and per column of B.

torch computes them by `torch._scaled_mm` with fast accumulation, cuBLAS's fastest variant, called
once per batch entry because it has no batched form. cuBLAS refuses K or N that are not multiples of
16; the default is then what a user has to run, a bf16 product of operands that were converted
before.

Factors of rows and columns vary by e^±0.25, like trained ones. torch's products with them are
slower, so torchao runs a product with factors of 1 and multiplies by both factors afterwards if
sums are precise. The finals time that sequence too.

D is in bf16, whose rounding is bounded as in `dense`. With fast accumulation the tensor core's
accumulator keeps about 13 fraction bits and truncates once per 32 terms. That error grows as
K / 32 · 2⁻¹⁴ · (about 0.6), and so does its bound, which reaches the error of one dropped slice of
128 near K = 32768. Beyond that, `max_error` detects a lost slice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from gemmsmith.core.operation import Grouping, Operation, Scaling
from gemmsmith.core.problem import Problem
from gemmsmith.runtime.abi import SCALING_CODES, Arguments
from tuner.workloads.matrices import (
    FACTOR_SPREAD,
    SIGMA,
    draw_factors,
    draw_matrices,
    exact_product,
    packed_arguments,
    unit_scale,
)
from tuner.workloads.ways import on_copies, products, products_of_unquantized, then
from tuner.workloads.workload import Block, Drawn, Launch, OperandSet, RandomSource, Tolerance, Way

FP8_MULTIPLE = 16
"""cuBLAS takes multiples of this as K and N."""

_ERROR, _MAX_ERROR = 5e-3, 1.5e-2
_FAST_ACCUMULATION_PER_K = 1.25e-6
"""Bound on the growth of the error with K, see above."""

ROW_FACTORS = math.exp(2 * FACTOR_SPREAD**2)
"""Growth of D's standard deviation by factors of rows and columns: the mean square of exp(s·N) is
exp(2·s²), and there are two such factors."""


class Scaled:
    """FP8 operands, FP32 factors of tensors or of rows and columns, and D in bf16."""

    def covers(self, operation: Operation) -> bool:
        scaled = operation.is_narrow_float and operation.scaling in (Scaling.TENSOR, Scaling.ROW)
        return scaled and not (operation.is_fused or operation.is_grouped)

    def draw(self, problem: Problem, count: int, source: RandomSource) -> Drawn:
        """`count` sets of operands that use the range of their types.

        All sets share the factors of tensors; factors of rows and columns are a set's own.
        """
        operation, scale = problem.operation, unit_scale(problem.k)
        sigma_a, sigma_b = SIGMA[operation.a], SIGMA[operation.b]
        sets, check = draw_matrices(problem, count, source, sigma_a, sigma_b)
        sigma = math.sqrt(problem.k) * scale
        if operation.scaling is Scaling.ROW:
            sets = with_row_factors(problem, sets, scale, source)
            return Drawn(sets=sets, check=check, sigma=sigma * ROW_FACTORS)
        scale_a, scale_b = (
            torch.full((1,), value, dtype=torch.float32, device=source.place)
            for value in (1.0 / sigma_a, scale / sigma_b)
        )
        sets = tuple(replace(s, scale_a=scale_a, scale_b=scale_b) for s in sets)
        return Drawn(sets=sets, check=check, sigma=sigma)

    def arguments(self, problem: Problem, operands: OperandSet, d: torch.Tensor) -> Arguments:
        arguments = packed_arguments(problem, operands, d)
        set_factors(arguments, problem, operands)
        return arguments

    def precision(self, problem: Problem) -> torch.dtype:  # noqa: ARG002
        # FP32 suffices for a D that is rounded to 16 bits.
        return torch.float32

    def product(self, problem: Problem, operands: OperandSet, block: Block) -> torch.Tensor:
        """A block of A·B times its factors. Factors of tensors are powers of two, so exact."""
        scale_a, scale_b = factors(operands)
        if problem.operation.scaling is Scaling.ROW:
            scale_a = scale_a[block.batches, block.rows]
            scale_b = scale_b[block.batches, :, block.columns]
        return exact_product(operands, block, self.precision(problem)).mul_(scale_a).mul_(scale_b)

    def tolerance(self, problem: Problem, *, fast_accumulation: bool) -> Tolerance:
        drift = _FAST_ACCUMULATION_PER_K * problem.k if fast_accumulation else 0.0
        return Tolerance(error=_ERROR + drift, max_error=_MAX_ERROR + drift)

    def defaults(self, problem: Problem) -> Sequence[Way]:
        fast = Way(name="torch._scaled_mm", launches=_scaled, takes=is_taken)
        return fast, _in_bf16(problem)

    def alternatives(self, problem: Problem) -> Sequence[Way]:
        """Precise accumulation, bf16, and factors of rows and columns after the product."""
        if not is_taken(problem):
            return ()
        others = (
            Way(
                name="torch._scaled_mm without fast accumulation",
                launches=partial(_scaled, fast=False),
            ),
            _in_bf16(problem),
        )
        if problem.operation.scaling is Scaling.TENSOR:
            return others
        return (Way(name="torch._scaled_mm, then both scales", launches=_then, rival=True), *others)


def factors(operands: OperandSet) -> tuple[torch.Tensor, torch.Tensor]:
    scale_a, scale_b = operands.scale_a, operands.scale_b
    assert scale_a is not None and scale_b is not None  # noqa: S101, PT018 - drawn with them
    return scale_a, scale_b


def with_row_factors(
    problem: Problem, sets: Sequence[OperandSet], scale: float, source: RandomSource
) -> tuple[OperandSet, ...]:
    """The sets with factors of rows and columns that undo SIGMA and multiply D by `scale`."""
    operation = problem.operation
    rows, columns = (problem.matrices[2], problem.m, 1), (problem.batch, 1, problem.n)
    return tuple(
        replace(
            s,
            scale_a=draw_factors(rows, 1.0 / SIGMA[operation.a], source),
            scale_b=draw_factors(columns, scale / SIGMA[operation.b], source),
        )
        for s in sets
    )


def set_factors(arguments: Arguments, problem: Problem, operands: OperandSet) -> None:
    """Set the arguments of a set's factors. The factors of a batch or of groups are packed."""
    scaling, grouping = problem.operation.scaling, problem.operation.grouping
    scale_a, scale_b = factors(operands)
    arguments.scaling = SCALING_CODES[scaling]
    arguments.scale_a, arguments.scale_b = scale_a.data_ptr(), scale_b.data_ptr()
    if scaling is Scaling.ROW:
        # The rows of all groups are one matrix, with one vector of factors.
        arguments.batch_stride_scale_a = 0 if grouping is Grouping.ROWS else problem.m
        arguments.batch_stride_scale_b = problem.n


def is_taken(problem: Problem) -> bool:
    return problem.k % FP8_MULTIPLE == 0 and problem.n % FP8_MULTIPLE == 0


def _in_bf16(problem: Problem) -> Way:
    """The product of converted operands, which include their factors of rows and columns."""
    if problem.operation.scaling is Scaling.ROW:
        wide = products_of_unquantized(factors)
        return Way(name="torch.mm on bf16 operands", launches=wide)
    return Way(name="torch.mm on bf16 copies", launches=on_copies(products, torch.bfloat16))


def _then(problem: Problem, sets: Sequence[OperandSet], room: int) -> list[Launch]:
    """The product with factors of 1, and then D times both factors in place."""
    unit = torch.ones(1, dtype=torch.float32, device=sets[0].d.device)
    launches = _scaled(problem, [replace(s, scale_a=unit, scale_b=unit) for s in sets], room)
    return [
        then(launch, *(partial(s.d.mul_, factor) for factor in factors(s)))
        for launch, s in zip(launches, sets, strict=True)
    ]


def _scaled(_: Problem, sets: Sequence[OperandSet], __: int, *, fast: bool = True) -> list[Launch]:
    def launch(s: OperandSet) -> torch.Tensor:
        # A tensor's factor is used for the whole batch.
        scales = [scale if scale.dim() == 3 else [scale] * len(s.d) for scale in factors(s)]
        for a, b, scale_a, scale_b, d in zip(s.a, s.b, *scales, s.d, strict=True):
            scaled_mm(a, b, (scale_a, scale_b), d.dtype, out=d, fast=fast)
        return s.d

    return [partial(launch, s) for s in sets]


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor],
    dtype: torch.dtype,
    *,
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    fast: bool = True,
) -> torch.Tensor:
    return torch._scaled_mm(a, b, *scales, bias=bias, out_dtype=dtype, use_fast_accum=fast, out=out)
