"""Products of a layer's backward pass with the derivative of the activation before that layer.

The operands are those of the bare product, dY and W. aux, the activation's argument, is drawn from
N(0, 1); it has shape [M, N], or [M, 2N] for gate and up. All outputs are one tensor D of shape
[outputs, M, N], so that all are poisoned, compared with their references, and compared with a
second run:

    plain           the gradient, and the activation's value if the epilogue gives it
    gated           the gradients of gate and up, and the value. They lie side by side in the rows
                    of one matrix, as kernels store them, so D is a view with longer rows
    bias gradient   the gradient, with one more row: the sum of all other rows

The reference is computed in FP32 without intermediate rounding. Tolerances are those of the bare
product, which bound one rounding of D: a kernel rounds each output once, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from gemmsmith.core.activations import ACTIVATIONS, through
from gemmsmith.core.epilogue import Activation, Backward
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import Problem
from gemmsmith.runtime.abi import Arguments
from tuner.workloads import backward_ways
from tuner.workloads.backward_ways import parts_of
from tuner.workloads.dense import Dense
from tuner.workloads.fused import root_mean_square, spread
from tuner.workloads.matrices import (
    draw_matrices,
    empty,
    exact_product,
    fill,
    laid_in_rows,
    packed_arguments,
    unit_scale,
)
from tuner.workloads.workload import (
    Block,
    Case,
    Drawn,
    OperandSet,
    RandomSource,
    Tolerance,
    Way,
    drawn_with,
)

_ONE = slice(0, 1)


class BackwardProducts:
    """bf16 and fp16 products with a backward epilogue."""

    def covers(self, operation: Operation) -> bool:
        return operation.epilogue.backward is not None and not operation.is_grouped

    def draw(self, problem: Problem, count: int, source: RandomSource) -> Drawn:
        """The bare product's sets, each with its own aux."""
        parts, element = parts_of(problem), problem.operation.d
        m, n = problem.m, problem.n
        scale = unit_scale(problem.k)
        rows = m + parts.bias_gradient
        sets, check = draw_matrices(problem, count, source, 1.0, scale, rows_d=rows)
        aux = empty(source, count, m * n * parts.halves, element)
        fill(aux, element, 1.0, source)
        width = n * parts.halves
        if parts.gated:
            sets = tuple(replace(s, d=laid_in_rows(s.d)) for s in sets)
            check = laid_in_rows(check)
        sets = tuple(
            replace(s, aux=aux[i, : m * width].view(1, m, width)) for i, s in enumerate(sets)
        )
        sigmas = _sigmas(parts, math.sqrt(problem.k) * scale)
        case = Case(operands=sets[0], written=rows, sigmas=sigmas)
        return Drawn(sets=sets, check=check, sigma=sigmas[0], cases=(case,))

    def arguments(self, problem: Problem, operands: OperandSet, d: torch.Tensor) -> Arguments:
        """The C ABI's arguments of a set with the outputs `d`."""
        parts = parts_of(problem)
        arguments = packed_arguments(problem, operands, d)
        leading = d.stride(1)
        arguments.ldc = arguments.ldd = leading
        arguments.aux, arguments.ld_aux = (
            drawn_with(operands.aux).data_ptr(),
            problem.n * parts.halves,
        )
        if parts.activated:
            arguments.activated, arguments.ld_activated = d[parts.halves].data_ptr(), leading
        if parts.bias_gradient:
            arguments.bias_gradient = d[0, problem.m].data_ptr()
        return arguments

    def precision(self, problem: Problem) -> torch.dtype:  # noqa: ARG002
        return torch.float32

    def product(self, problem: Problem, operands: OperandSet, block: Block) -> torch.Tensor:
        """A block of the outputs, which may include the row of sums after the gradient."""
        m = problem.m
        first, last = block.rows.start, block.rows.stop
        outputs = _outputs(problem, operands, replace(block, rows=slice(first, min(last, m))))
        if last > m:
            # The last row is the sum of all others, which are computed in blocks of this height.
            step = last - first
            sums = sum(
                _outputs(problem, operands, replace(block, rows=slice(row, min(row + step, m))))[
                    0
                ].sum(0, dtype=torch.float64)
                for row in range(0, m, step)
            )
            assert isinstance(sums, torch.Tensor)  # noqa: S101 - m is at least 1
            outputs = [torch.cat([outputs[0], sums.float().view(1, -1)])]
        return torch.stack(outputs[block.batches])

    def tolerance(self, problem: Problem, *, fast_accumulation: bool) -> Tolerance:
        return Dense().tolerance(problem, fast_accumulation=fast_accumulation)

    def defaults(self, problem: Problem) -> Sequence[Way]:
        return backward_ways.defaults(problem)

    def alternatives(self, problem: Problem) -> Sequence[Way]:
        return backward_ways.alternatives(problem)


def _outputs(problem: Problem, operands: OperandSet, block: Block) -> list[torch.Tensor]:
    """All outputs of a block, each [rows, columns], without the row of sums."""
    parts, n = parts_of(problem), problem.n
    gradient = exact_product(operands, replace(block, batches=_ONE), torch.float32)[0]
    aux = drawn_with(operands.aux)[0, block.rows]
    linear = aux[:, :n][:, block.columns].float()
    value = ACTIVATIONS[parts.activation](linear)
    if not parts.gated:
        gradients = [through(parts.activation, gradient, linear)]
        return [*gradients, value] if parts.activated else gradients
    up = aux[:, n:][:, block.columns].float()
    gradients = [through(parts.activation, gradient * up, linear), gradient * value]
    return [*gradients, value * up] if parts.activated else gradients


def _sigmas(parts: Backward, product: float) -> tuple[float, ...]:
    """Root mean squares of the outputs; `product` is the bare product's."""
    value, slope = spread(parts.activation, 1.0), slope_spread(parts.activation)
    if parts.gated:
        return (product * slope, product * value, value)[: 2 + parts.activated]
    # The squares of the row of sums add up to as much as those of all other rows together.
    gradient = product * slope * (math.sqrt(2.0) if parts.bias_gradient else 1.0)
    return (gradient, value) if parts.activated else (gradient,)


def slope_spread(activation: Activation) -> float:
    return root_mean_square(lambda x: through(activation, torch.ones_like(x), x))
