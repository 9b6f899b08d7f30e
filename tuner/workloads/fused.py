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
from functools import cache, partial

import torch

from gemmsmith.core.activations import ACTIVATIONS
from gemmsmith.core.epilogue import Activation, StepKind
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import Problem
from gemmsmith.runtime.abi import Arguments
from tuner.workloads import epilogue_ways, fp8_output
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
        drawn = bare(operation).draw(problem, count, source)
        sets, sigma, argument = drawn.sets, drawn.sigma, drawn.sigma
        stored: tuple[float, ...] = ()
        for step in operation.epilogue.steps:
            match step.kind:
                case StepKind.STORE:
                    stored = (sigma,)
                case StepKind.APPLY:
                    argument, sigma = sigma, spread(Activation(step.by), sigma)
                case _:
                    tensors = _drawn(step.by, problem, count, source)
                    sets = tuple(
                        replace(s, **{step.by: tensor})  # type: ignore[arg-type]
                        for s, tensor in zip(sets, tensors, strict=True)
                    )
                    size = _size(step.by)
                    adds = step.kind is StepKind.ADD
                    sigma = math.hypot(sigma, size) if adds else sigma * size
        if operation.stores_fp8:
            activation = operation.epilogue.activation
            largest = peak(activation, argument if activation else sigma)
            sets, factor = fp8_output.with_factor(sets, largest, source)
            sigma *= factor
        case = Case(operands=sets[0], written=problem.m, sigmas=(sigma, *stored))
        return Drawn(sets=sets, check=drawn.check, sigma=sigma, cases=(case,))

    def arguments(self, problem: Problem, operands: OperandSet, d: torch.Tensor) -> Arguments:
        """The C ABI's arguments of a set with output `d`, which includes aux."""
        epilogue = problem.operation.epilogue
        arguments = bare(problem.operation).arguments(problem, operands, d)
        for step in epilogue.steps:
            if step.kind in (StepKind.MULTIPLY, StepKind.ADD):
                setattr(arguments, step.by, drawn_with(getattr(operands, step.by)).data_ptr())
        if epilogue.has_residual:
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
        value = bare(operation).product(problem, operands, replace(block, batches=slice(0, 1)))
        stored = []
        for step in operation.epilogue.steps:
            match step.kind:
                case StepKind.STORE:
                    stored.append(value)
                case StepKind.APPLY:
                    value = ACTIVATIONS[step.by](value)
                case StepKind.MULTIPLY:
                    value = value * _within(block, getattr(operands, step.by))
                case _:
                    value = value + _within(block, getattr(operands, step.by))
        if operation.stores_fp8:
            return value * drawn_with(operands.scale_d)
        return torch.cat([value, *stored][block.batches])

    def tolerance(self, problem: Problem, *, fast_accumulation: bool) -> Tolerance:
        return carried(problem, _DRIFT, fast_accumulation=fast_accumulation)

    def defaults(self, problem: Problem) -> Sequence[Way]:
        return epilogue_ways.defaults(problem)

    def alternatives(self, problem: Problem) -> Sequence[Way]:
        return epilogue_ways.alternatives(problem)


def _within(block: Block, operand: torch.Tensor) -> torch.Tensor:
    """The block's part of an operand: [1, m, n], or a vector, which has an extent of 1."""
    _, m, n = operand.shape
    rows = slice(None) if m == 1 else block.rows
    return operand[:, rows, slice(None) if n == 1 else block.columns]


def _drawn(name: str, problem: Problem, count: int, source: RandomSource) -> Sequence[torch.Tensor]:
    """An operand of each set: a factor or an addend of columns, of rows, or of all elements."""
    if name == "row_scale":
        return list(draw_factors((count, problem.m, 1), 1.0, source)[:, None])
    operation, m, n = problem.operation, problem.m, problem.n
    size, shape = (m * n, (1, m, n)) if name == "residual" else (n, (1, 1, n))
    element = operation.bias if name == "bias" else operation.d
    packed = empty(source, count, size, element)
    if name == "column_scale":
        drawn = draw_factors((1, *packed.shape), COLUMN_FACTOR, source)[0]
        signs = torch.empty_like(drawn).bernoulli_(0.5, generator=source.generator).mul_(2).sub_(1)
        packed.copy_(drawn * signs)
    else:
        fill(packed, element, _size(name), source)
    return [row[:size].view(shape) for row in packed]


@cache
def _size(name: str) -> float:
    """The root mean square of an operand."""
    factor = root_mean_square(lambda x: torch.exp(FACTOR_SPREAD * x))
    return {
        "row_scale": factor,
        "column_scale": COLUMN_FACTOR * factor,
        "bias": BIAS_SIGMA,
        "residual": RESIDUAL_SIGMA,
    }[name]


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
