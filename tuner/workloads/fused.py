"""Products of linear layers with their epilogue: factors, bias, activation, residual.

The operands are those of the bare product. The bias is drawn from N(0, 1/4), because trained biases
are near zero, and the residual, of D's size, from N(0, 1). Factors of columns have either sign and
are mostly between 0.1 and 1, like those of a trained LayerScale, so that the product remains a
visible part of the sum. Factors of rows are near 1, like those of an RMS norm. If the epilogue
stores aux, the argument of the activation or of the column factors, the outputs are one tensor
[2, M, N]: D, then aux. So both are poisoned, compared with their own reference, and compared with a
second run.

The reference is computed in FP32 from the operands in memory, without intermediate rounding. A
sequence of torch's calls rounds the activation's argument, a fused kernel does not. Tolerances are
those of the bare product, which bound one rounding of D. If FP8 sums stay in the tensor core, their
drift passes through the activation: the root mean square of its derivative over that of its values
is at most 1.2 for the drawn spread. For a D in FP8 see `tuner.workloads.fp8_output`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from gemmsmith.core.activations import ACTIVATIONS
from gemmsmith.core.epilogue import Activation
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import Problem
from gemmsmith.runtime.abi import Arguments
from tuner.workloads import fp8_output, fp8_ways, fused_ways
from tuner.workloads.dense import Dense
from tuner.workloads.matrices import FACTOR_SPREAD, draw_factors, empty, fill
from tuner.workloads.scaled import Scaled
from tuner.workloads.workload import (
    Block,
    Case,
    Drawn,
    OperandSet,
    RandomSource,
    Tolerance,
    Way,
    Workload,
    drawn_with,
)

BIAS_SIGMA, RESIDUAL_SIGMA = 0.5, 1.0
COLUMN_FACTOR = 0.4
"""Median of the absolute values of column factors."""
_DRIFT = 1.25
"""Growth of the tensor core's drift in an activation: 1.2, rounded up."""


class Fused:
    """bf16, fp16 and FP8 (one factor per operand) products with an epilogue."""

    def covers(self, operation: Operation) -> bool:
        epilogue = operation.epilogue
        return operation.is_fused and epilogue.backward is None and not epilogue.is_gated

    def draw(self, problem: Problem, count: int, source: RandomSource) -> Drawn:
        """The bare product's sets, each with its own vectors and residual."""
        operation = problem.operation
        epilogue, element = operation.epilogue, operation.d
        drawn = bare(operation).draw(problem, count, source)
        sets = drawn.sets
        linear = drawn.sigma
        if epilogue.has_row_scale:
            rows = draw_factors((count, problem.m, 1), 1.0, source)
            sets = tuple(replace(s, row_scale=rows[i : i + 1]) for i, s in enumerate(sets))
            linear *= root_mean_square(_factor)
        if epilogue.has_bias:
            biases = empty(source, count, problem.n, operation.bias)
            fill(biases, operation.bias, BIAS_SIGMA, source)
            sets = tuple(
                replace(s, bias=biases[i, : problem.n].view(1, 1, -1)) for i, s in enumerate(sets)
            )
            linear = math.hypot(linear, BIAS_SIGMA)
        sigma = linear
        if epilogue.has_column_scale:
            columns = _column_factors(problem, count, source)
            sets = tuple(
                replace(s, column_scale=columns[i, : problem.n].view(1, 1, -1))
                for i, s in enumerate(sets)
            )
            sigma *= COLUMN_FACTOR * root_mean_square(_factor)
        if epilogue.has_residual:
            size = problem.m * problem.n
            residuals = empty(source, count, size, element)
            fill(residuals, element, RESIDUAL_SIGMA, source)
            sets = tuple(
                replace(s, residual=residuals[i, :size].view(1, problem.m, problem.n))
                for i, s in enumerate(sets)
            )
            sigma = math.hypot(sigma, RESIDUAL_SIGMA)
        if epilogue.activation is not None:
            sigma = spread(epilogue.activation, linear)
        if operation.stores_fp8:
            largest = peak(epilogue.activation, linear)
            sets, factor = fp8_output.with_factor(sets, largest, source)
            sigma *= factor
        sigmas = (sigma, linear) if epilogue.stores_aux else (sigma,)
        case = Case(operands=sets[0], written=problem.m, sigmas=sigmas)
        return Drawn(sets=sets, check=drawn.check, sigma=sigma, cases=(case,))

    def arguments(self, problem: Problem, operands: OperandSet, d: torch.Tensor) -> Arguments:
        """The C ABI's arguments of a set with output `d`, which includes aux."""
        epilogue = problem.operation.epilogue
        arguments = bare(problem.operation).arguments(problem, operands, d)
        if epilogue.has_row_scale:
            arguments.row_scale = drawn_with(operands.row_scale).data_ptr()
        if epilogue.has_bias:
            arguments.bias = drawn_with(operands.bias).data_ptr()
        if epilogue.has_column_scale:
            arguments.column_scale = drawn_with(operands.column_scale).data_ptr()
        if epilogue.has_residual:
            arguments.residual = drawn_with(operands.residual).data_ptr()
            arguments.ld_residual = problem.n
        if epilogue.stores_aux:
            arguments.aux, arguments.ld_aux = d[1].data_ptr(), problem.n
        if problem.operation.stores_fp8:
            fp8_output.set_addresses(arguments, operands)
        return arguments

    def precision(self, problem: Problem) -> torch.dtype:
        return bare(problem.operation).precision(problem)

    def product(self, problem: Problem, operands: OperandSet, block: Block) -> torch.Tensor:
        """A block of D and aux."""
        operation = problem.operation
        linear = bare(operation).product(problem, operands, replace(block, batches=slice(0, 1)))
        epilogue = operation.epilogue
        if epilogue.has_row_scale:
            linear *= drawn_with(operands.row_scale)[:, block.rows]
        if epilogue.has_bias:
            linear += drawn_with(operands.bias)[:, :, block.columns]
        value = ACTIVATIONS[epilogue.activation](linear) if epilogue.activation else linear
        if epilogue.has_column_scale:
            value = value * drawn_with(operands.column_scale)[:, :, block.columns].to(value.dtype)
        if epilogue.has_residual:
            value = value + drawn_with(operands.residual)[:, block.rows, block.columns]
        if operation.stores_fp8:
            return value * drawn_with(operands.scale_d)
        outputs = [value]
        if epilogue.stores_aux:
            outputs.append(linear)
        return torch.cat(outputs[block.batches])

    def tolerance(self, problem: Problem, *, fast_accumulation: bool) -> Tolerance:
        return carried(problem, _DRIFT, fast_accumulation=fast_accumulation)

    def defaults(self, problem: Problem) -> Sequence[Way]:
        ways = fused_ways.defaults(problem)
        return fp8_ways.defaults(ways) if problem.operation.stores_fp8 else ways

    def alternatives(self, problem: Problem) -> Sequence[Way]:
        if problem.operation.stores_fp8:
            return fp8_ways.alternatives(problem)
        return fused_ways.alternatives(problem)


def _factor(x: torch.Tensor) -> torch.Tensor:
    """A factor of `draw_factors` relative to its median, as a function of a normal sample."""
    return torch.exp(FACTOR_SPREAD * x)


def _column_factors(problem: Problem, count: int, source: RandomSource) -> torch.Tensor:
    """Factors of columns in D's type, [count, N + padding]."""
    factors = empty(source, count, problem.n, problem.operation.d)
    drawn = draw_factors((1, *factors.shape), COLUMN_FACTOR, source)[0]
    signs = torch.empty_like(drawn).bernoulli_(0.5, generator=source.generator).mul_(2).sub_(1)
    return factors.copy_(drawn * signs)


def peak(activation: Activation | None, sigma: float) -> float:
    """The activation's largest absolute value within SIGMAS of N(0, sigma²), which FP8 must hold.

    The activation None is the identity.
    """
    x = torch.tensor([-sigma, sigma], dtype=torch.float64) * fp8_output.SIGMAS
    return float((ACTIVATIONS[activation](x) if activation else x).abs().max())


def spread(activation: Activation, sigma: float) -> float:
    return root_mean_square(lambda x: ACTIVATIONS[activation](x * sigma))


def root_mean_square(function: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """Root mean square of a function's values, for arguments from N(0, 1)."""
    x = torch.linspace(-8.0, 8.0, 4001, dtype=torch.float64)
    weights = torch.exp(-x.square() / 2)
    return math.sqrt(float((function(x).square() * weights).sum() / weights.sum()))


def carried(problem: Problem, factor: float, *, fast_accumulation: bool) -> Tolerance:
    """The bare product's tolerance, with `factor` on the drift of sums in the tensor core."""
    bounds = partial(bare(problem.operation).tolerance, problem)
    exact = bounds(fast_accumulation=False)
    drift = factor * (bounds(fast_accumulation=fast_accumulation).error - exact.error)
    bound = fp8_output.rounded(problem, exact) if problem.operation.stores_fp8 else exact
    return replace(
        bound, error=bound.error + drift, max_error=bound.max_error + drift, amax=bound.amax + drift
    )


def bare(operation: Operation) -> Workload:
    return Scaled() if operation.is_scaled else Dense()
