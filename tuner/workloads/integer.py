"""INT8 products: D in 32-bit integers, or in bf16 with alpha or factors of rows and columns.

Values are those of symmetric quantization by the largest value of a row or column: normal, with a
standard deviation of 32. Factors of rows and columns vary by e^±0.25, like trained ones; alpha is a
power of two.

Sums of integers are exact in any order, and FP64 holds them up to 2³⁸ terms, because a product is
below 2¹⁴. So D in 32-bit integers must be equal. bf16 output is rounded once, and bounded as in
`dense`.

`torch._int_mm` stores 32-bit integers only, takes M above 16 and K and N that are multiples of 8,
and has no batched form, so it is called once per batch entry. For other extents the default runs on
operands that were padded with zeros before; its result is the corner of a larger matrix. For bf16,
torch runs the product and then elementwise kernels: one for alpha, two for factors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.nn import functional

from gemmsmith.core.operation import Operation, Scaling
from gemmsmith.core.problem import Problem
from gemmsmith.runtime.abi import Arguments
from tuner.workloads.matrices import (
    SIGMA,
    draw_matrices,
    exact_product,
    packed_arguments,
    unit_scale,
)
from tuner.workloads.scaled import ROW_FACTORS, factors, set_factors, with_row_factors
from tuner.workloads.ways import mm_name, products_of_unquantized, then
from tuner.workloads.workload import Block, Drawn, Launch, OperandSet, RandomSource, Tolerance, Way

INT_MM_MULTIPLE = 8
"""`torch._int_mm` takes multiples of this as K and N."""
INT_MM_ROWS = 17
"""The least M that `torch._int_mm` takes."""

_EXACT = Tolerance(error=0.0, max_error=0.0)
_ROUNDED = Tolerance(error=5e-3, max_error=1.5e-2)


class Integer:
    """INT8 operands, D in 32-bit integers or in bf16."""

    def covers(self, operation: Operation) -> bool:
        scalings = (Scaling.NONE, Scaling.ROW)
        return operation.a.is_integer and operation.scaling in scalings

    def draw(self, problem: Problem, count: int, source: RandomSource) -> Drawn:
        """`count` sets of operands, each with its own factors if the operation has any."""
        operation = problem.operation
        sigma_a, sigma_b = SIGMA[operation.a], SIGMA[operation.b]
        sets, check = draw_matrices(problem, count, source, sigma_a, sigma_b)
        sigma = sigma_a * sigma_b * math.sqrt(problem.k) * _alpha(problem)
        if operation.is_scaled:
            scale = unit_scale(problem.k)
            sets = with_row_factors(problem, sets, scale, source)
            sigma *= scale / (sigma_a * sigma_b) * ROW_FACTORS
        return Drawn(sets=sets, check=check, sigma=sigma)

    def arguments(self, problem: Problem, operands: OperandSet, d: torch.Tensor) -> Arguments:
        arguments = packed_arguments(problem, operands, d, alpha=_alpha(problem))
        if problem.operation.is_scaled:
            set_factors(arguments, problem, operands)
        return arguments

    def precision(self, problem: Problem) -> torch.dtype:  # noqa: ARG002
        # FP64 holds every sum exactly.
        return torch.float64

    def product(self, problem: Problem, operands: OperandSet, block: Block) -> torch.Tensor:
        """A block of A·B times alpha and the factors."""
        product = exact_product(operands, block, self.precision(problem))
        if problem.operation.is_scaled:
            scale_a, scale_b = factors(operands)
            product.mul_(scale_a[block.batches, block.rows])
            product.mul_(scale_b[block.batches, :, block.columns])
        alpha = _alpha(problem)
        return product if alpha == 1.0 else product.mul_(alpha)

    def tolerance(self, problem: Problem, *, fast_accumulation: bool) -> Tolerance:  # noqa: ARG002
        return _EXACT if problem.operation.d.is_integer else _ROUNDED

    def defaults(self, problem: Problem) -> Sequence[Way]:
        """`torch._int_mm` and elementwise kernels, or the same on padded operands."""
        after = _after(problem)
        return (
            Way(name=f"torch._int_mm{after}", launches=_int_mm, takes=_is_taken),
            Way(name=f"torch._int_mm on padded operands{after}", launches=_padded),
        )

    def alternatives(self, problem: Problem) -> Sequence[Way]:
        """The call of a program that does not quantize: bf16 operands, and D in bf16."""
        if problem.operation.d.is_integer:
            return ()
        scales = factors if problem.operation.is_scaled else lambda _: (1.0, _alpha(problem))
        wide = products_of_unquantized(scales)
        return (Way(name=f"{mm_name(problem)} on bf16 operands", launches=wide),)


def _alpha(problem: Problem) -> float:
    """Alpha: 1, or for bf16 without factors the power of two that brings D near N(0, 1)."""
    operation = problem.operation
    if operation.d.is_integer or operation.is_scaled:
        return 1.0
    return unit_scale(problem.k) / (SIGMA[operation.a] * SIGMA[operation.b])


def _after(problem: Problem) -> str:
    if problem.operation.d.is_integer:
        return ""
    return ", then both scales" if problem.operation.is_scaled else ", then alpha"


def _is_taken(problem: Problem) -> bool:
    aligned = problem.k % INT_MM_MULTIPLE == 0 and problem.n % INT_MM_MULTIPLE == 0
    return aligned and problem.m >= INT_MM_ROWS


def _int_mm(problem: Problem, sets: Sequence[OperandSet], _: int) -> list[Launch]:
    """Products into D, or into one intermediate result and from there into D."""
    if problem.operation.d.is_integer:
        return [_summed(s.a, s.b, s.d) for s in sets]
    sums = torch.empty_like(sets[0].d, dtype=torch.int32)
    step = _scaling(problem, sums)
    return [then(_summed(s.a, s.b, sums), step(s)) for s in sets]


def _padded(problem: Problem, sets: Sequence[OperandSet], room: int) -> list[Launch]:
    """As `_int_mm`, on padded copies of as many sets as fit in `room` bytes."""
    m, n, k = problem.m, problem.n, problem.k
    rows = max(m, INT_MM_ROWS)
    columns, depth = (-(-size // INT_MM_MULTIPLE) * INT_MM_MULTIPLE for size in (n, k))
    fitting = max(1, room // (problem.batch * depth * (rows + columns)))
    sums = torch.empty((problem.batch, rows, columns), dtype=torch.int32, device=sets[0].d.device)
    corner = sums[:, :m, :n]
    step = None if problem.operation.d.is_integer else _scaling(problem, corner)
    launches = []
    for s in sets[:fitting]:
        a = functional.pad(s.a, (0, depth - k, 0, rows - m))
        b = functional.pad(s.b.mT, (0, depth - k, 0, columns - n)).mT
        multiply = _summed(a, b, sums)
        launches.append(then(multiply, lambda: corner) if step is None else then(multiply, step(s)))
    return launches


def _summed(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor) -> Launch:
    entries = list(zip(a, b, d, strict=True))

    def launch() -> torch.Tensor:
        for left, right, out in entries:
            torch._int_mm(left, right, out=out)
        return d

    return launch


def _scaling(problem: Problem, sums: torch.Tensor) -> Callable[[OperandSet], Launch]:
    """The step from the sums to a set's D: one elementwise kernel for alpha, two for factors."""
    if not problem.operation.is_scaled:
        alpha = _alpha(problem)
        return lambda s: partial(torch.mul, sums, alpha, out=s.d)
    scaled = torch.empty(sums.shape, dtype=torch.float32, device=sums.device)

    def by_factors(s: OperandSet) -> Launch:
        scale_a, scale_b = factors(s)
        return then(
            partial(torch.mul, sums, scale_a, out=scaled),
            partial(torch.mul, scaled, scale_b, out=s.d),
        )

    return by_factors
