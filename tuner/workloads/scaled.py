"""FP8 products with one factor per operand.

torch runs them through `torch._scaled_mm` with fast accumulation, cuBLAS's fastest variant, once
per batch entry: it has no batched form. Extents K or N that are no multiple of 16 are refused by
cuBLAS; the default is then what a user would have to do, a bf16 product of operands converted
beforehand.

D is in bf16, whose rounding bounds the error as in `dense`. With fast accumulation the tensor
core's accumulator keeps about 13 fraction bits and truncates once per 32 terms, an error that
grows with K / 32 · 2⁻¹⁴ · (about 0.6): its bound grows likewise, and meets the error of one
dropped slice of 128 only near K = 32768. Beyond that `max_error` is what catches a lost slice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from gemmsmith.operation import Operation, Scaling
from gemmsmith.problem import Problem
from gemmsmith.runtime.abi import SCALING_CODES, Arguments
from tuner.workloads.matrices import (
    SIGMA,
    draw_matrices,
    exact_product,
    packed_arguments,
    unit_scale,
)
from tuner.workloads.ways import products_of_copies
from tuner.workloads.workload import (
    Block,
    Drawn,
    Launch,
    OperandSet,
    RandomSource,
    Tolerance,
    Way,
)

FP8_MULTIPLE = 16
"""K and N that cuBLAS takes."""

_ERROR, _MAX_ERROR = 5e-3, 1.5e-2
_FAST_ACCUMULATION_PER_K = 1.25e-6


class Scaled:
    """FP8 operands, one FP32 factor for each, D in bf16."""

    def covers(self, operation: Operation) -> bool:
        """Whether the operation is of this family."""
        scaled = operation.is_narrow_float and operation.scaling is Scaling.TENSOR
        return scaled and not operation.is_fused

    def draw(self, problem: Problem, count: int, source: RandomSource) -> Drawn:
        """`count` sets of operands that use their types' range; all share the factors."""
        operation, scale = problem.operation, unit_scale(problem.k)
        sigma_a, sigma_b = SIGMA[operation.a], SIGMA[operation.b]
        sets, check = draw_matrices(problem, count, source, sigma_a, sigma_b)
        scale_a, scale_b = (
            torch.full((1,), value, dtype=torch.float32, device=source.place)
            for value in (1.0 / sigma_a, scale / sigma_b)
        )
        return Drawn(
            sets=tuple(replace(s, scale_a=scale_a, scale_b=scale_b) for s in sets),
            check=check,
            sigma=math.sqrt(problem.k) * scale,
        )

    def arguments(self, problem: Problem, operands: OperandSet, d: torch.Tensor) -> Arguments:
        """The C ABI's arguments of a set with output `d`."""
        scale_a, scale_b = factors(operands)
        arguments = packed_arguments(problem, operands, d)
        arguments.scaling = SCALING_CODES[problem.operation.scaling]
        arguments.scale_a, arguments.scale_b = scale_a.data_ptr(), scale_b.data_ptr()
        return arguments

    def precision(self, problem: Problem) -> torch.dtype:  # noqa: ARG002
        """FP32 is enough for a D that is rounded to 16 bits."""
        return torch.float32

    def product(self, problem: Problem, operands: OperandSet, block: Block) -> torch.Tensor:
        """That block of A·B times both factors, which are powers of two."""
        scale_a, scale_b = factors(operands)
        return exact_product(operands, block, self.precision(problem)).mul_(scale_a * scale_b)

    def tolerance(self, problem: Problem, *, fast_accumulation: bool) -> Tolerance:
        """See the module."""
        drift = _FAST_ACCUMULATION_PER_K * problem.k if fast_accumulation else 0.0
        return Tolerance(error=_ERROR + drift, max_error=_MAX_ERROR + drift)

    def defaults(self, problem: Problem) -> Sequence[Way]:  # noqa: ARG002
        """`torch._scaled_mm`, or bf16 where cuBLAS does not take the extents."""
        return (
            Way(name="torch._scaled_mm", launches=_fast, takes=is_taken),
            Way(name="torch.mm on bf16 copies", launches=products_of_copies(torch.bfloat16)),
        )

    def alternatives(self, problem: Problem) -> Sequence[Way]:
        """Precise accumulation; no FP8 at all."""
        if not is_taken(problem):
            return ()
        return (
            Way(name="torch._scaled_mm without fast accumulation", launches=_precise),
            Way(name="torch.mm on bf16 copies", launches=products_of_copies(torch.bfloat16)),
        )


def factors(operands: OperandSet) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors of a set that has them."""
    scale_a, scale_b = operands.scale_a, operands.scale_b
    assert scale_a is not None and scale_b is not None  # noqa: S101, PT018 - drawn with them
    return scale_a, scale_b


def is_taken(problem: Problem) -> bool:
    """Whether cuBLAS takes FP8 operands of these extents."""
    return problem.k % FP8_MULTIPLE == 0 and problem.n % FP8_MULTIPLE == 0


def _fast(_: Problem, sets: Sequence[OperandSet], __: int) -> list[Launch]:
    return [_scaled(s, fast=True) for s in sets]


def _precise(_: Problem, sets: Sequence[OperandSet], __: int) -> list[Launch]:
    return [_scaled(s, fast=False) for s in sets]


def _scaled(operands: OperandSet, *, fast: bool) -> Launch:
    scale_a, scale_b = factors(operands)
    entries = list(zip(operands.a, operands.b, operands.d, strict=True))

    def launch() -> torch.Tensor:
        for a, b, d in entries:
            torch._scaled_mm(
                a,
                b,
                scale_a=scale_a,
                scale_b=scale_b,
                out_dtype=d.dtype,
                use_fast_accum=fast,
                out=d,
            )
        return operands.d

    return launch
