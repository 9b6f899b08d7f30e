"""Products with an epilogue: factors, bias, activation or gate, residual, and backward epilogues.

A, B and how tokens are grouped are those of the bare product. B of a gate holds the gate's columns
and then up's, like the weight of models that store both in one; a kernel reads them by two
pointers. `Epilogue.operands` names what else is read. A bias is drawn from N(0, 1/4), because
trained biases are near zero; a residual and the aux of a backward epilogue from N(0, 1). Factors of
columns have either sign and are mostly between 0.1 and 1, like those of a trained LayerScale, so
that the product remains a visible part of the sum. Factors of rows are near 1, like those of an RMS
norm; of a grouped product they are the router's shares, drawn between 1/32 and 1.

All outputs are one tensor [outputs, M, columns], so that all are poisoned, compared with their own
reference, and compared with a second run:

    forward         D, then aux. That of a gate is as it lies in memory: every row of 2·I is two
                    rows of I
    backward        the gradient, or those of gate and up, then the activation's value
    bias gradient   the gradient, with one more row: the sum of all other rows

The outputs of grouped products and of gates backwards lie side by side in the rows of one matrix.
So D is a view with longer rows, and the rows of tokens without a group stay unchanged in all. The
sums that add up to the gradients of a grouped product's factors are of another type, so they are
examined apart, against the gradient of up.

The reference is computed in FP32 from the operands in memory, without intermediate rounding. A
sequence of torch's calls rounds the activation's argument, a fused kernel does not. Tolerances are
those of the bare product, which bound one rounding of each output. If FP8 sums stay in the tensor
core, their drift passes through the activation: the root mean square of its derivative over that of
its values is at most 1.2 for the drawn spread. Gate and up both drift. For a D in FP8 see
`tuner.workloads.fp8_output`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

import torch

from gemmsmith.core.activations import ACTIVATIONS, activated, follow, gradients, through
from gemmsmith.core.epilogue import Activation, StepKind
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import Problem
from gemmsmith.runtime.abi import ROW_GRADIENT_COLUMNS, Arguments
from tuner.workloads import backward_ways, epilogue_ways, fp8_output, grouped_epilogue_ways
from tuner.workloads.dense import Dense
from tuner.workloads.grouped import Grouped
from tuner.workloads.matrices import FACTOR_SPREAD, draw_factors, empty, fill, laid_in_rows
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

BIAS_SIGMA, MATRIX_SIGMA = 0.5, 1.0
COLUMN_FACTOR = 0.4
"""Median of the absolute values of column factors."""
_LEAST_SHARE = 1 / 32
_DRIFT, _DRIFT_OF_GATE = 1.25, 1.75
"""Growth of the tensor core's drift in an activation: 1.2, rounded up. In the product of two
independent drifts: √(1 + 1.25²), rounded up."""
_OPERANDS = ("bias", "residual", "column_scale", "row_scale", "aux")
_POINTERS = (*_OPERANDS, "scale_d", "amax", "row_gradient")
"""Parts of a set whose addresses are arguments of the same name."""
_SUMMED_ROWS = 1024
"""Rows whose sums are examined at once."""


class Fused:
    """bf16, fp16 and FP8 (one factor per operand) products with an epilogue, and grouped gates."""

    def covers(self, operation: Operation) -> bool:
        return operation.is_fused

    def draw(self, problem: Problem, count: int, source: RandomSource) -> Drawn:
        """The bare product's sets, and what the epilogue reads. Sets that share A share it too."""
        operation, epilogue = problem.operation, problem.operation.epilogue
        drawn = _bare(operation).draw(problem, count, source)
        addresses = list(dict.fromkeys(s.a.data_ptr() for s in drawn.sets))
        names = (*epilogue.operands, *(("row_scale",) if operation.is_grouped else ()))
        parts = {name: _drawn(name, problem, len(addresses), source) for name in names}
        factor = 1.0
        if operation.stores_fp8:
            factor = fp8_output.factor(_largest(operation, drawn.sigma))
            scale_d = torch.full((1,), factor, dtype=torch.float32, device=source.place)
            parts["scale_d"] = [scale_d] * len(addresses)
            parts["amax"] = list(torch.zeros((len(addresses), 1), device=source.place))
        if operation.is_grouped and epilogue.backward is not None:
            slabs = -(-problem.n // ROW_GRADIENT_COLUMNS)
            sums = torch.empty((problem.m, slabs), dtype=torch.float32, device=source.place)
            parts["row_gradient"] = [sums] * len(addresses)  # all launches write the same
        lay = laid_in_rows if _in_rows(operation) else lambda d: d

        def completed(s: OperandSet) -> OperandSet:
            at = addresses.index(s.a.data_ptr())
            tensors = {name: tensors[at] for name, tensors in parts.items()}
            return replace(s, d=lay(s.d), **tensors)  # type: ignore[arg-type]

        first = Case(operands=drawn.sets[0], written=problem.m, sigmas=(drawn.sigma,))
        cases = tuple(
            replace(
                case,
                operands=completed(case.operands),
                written=case.written + epilogue.sums_rows,
                sigmas=_sigmas(operation, case.sigmas[0], factor),
            )
            for case in drawn.cases or (first,)
        )
        if "row_gradient" in parts:
            cases = tuple(
                replace(case, beside=partial(_fault_of_sums, case.operands, case.written))
                for case in cases
            )
        sigma = cases[0].sigmas[0]
        sets = tuple(map(completed, drawn.sets))
        return Drawn(sets=sets, check=lay(drawn.check), sigma=sigma, cases=cases)

    def arguments(self, problem: Problem, operands: OperandSet, d: torch.Tensor) -> Arguments:
        """The C ABI's arguments of a set with the outputs `d`."""
        operation, epilogue, leading = problem.operation, problem.operation.epilogue, d.stride(1)
        arguments = _bare(operation).arguments(problem, operands, d)
        arguments.ldc = arguments.ldd = leading
        for name in _POINTERS:
            if (tensor := getattr(operands, name)) is not None:
                setattr(arguments, name, tensor.data_ptr())
        if epilogue.has_residual:
            arguments.ld_residual = problem.n
        if epilogue.is_gated:
            arguments.b_up = operands.b[:, :, problem.columns :].data_ptr()
        if epilogue.stores_aux:
            arguments.aux = d[1].data_ptr()
            arguments.ld_aux = leading if _in_rows(operation) else problem.n
        if (parts := epilogue.backward) is not None:
            arguments.ld_aux = problem.n * parts.halves
            if parts.activated:
                arguments.activated, arguments.ld_activated = d[parts.halves].data_ptr(), leading
            if parts.bias_gradient:
                arguments.bias_gradient = d[0, problem.m].data_ptr()
        return arguments

    def precision(self, problem: Problem) -> torch.dtype:
        return _bare(problem.operation).precision(problem)

    def product(self, problem: Problem, operands: OperandSet, block: Block) -> torch.Tensor:
        """A block of the outputs, which may include the row of sums after the gradient."""
        epilogue, m, rows = problem.operation.epilogue, problem.m, block.rows
        of_rows = partial(_outputs, problem, operands, block.columns)
        if epilogue.is_gated and epilogue.stores_aux and not problem.operation.is_grouped:
            blocks = of_rows(rows)[:1] if block.batches.start == 0 else []
            for matrix in range(max(1, block.batches.start), block.batches.stop):
                # Rows of aux are gate, up, gate, up …: two for each token.
                first, count = (matrix - 1) * m + rows.start, rows.stop - rows.start
                halves = of_rows(slice(first // 2, (first + count + 1) // 2))[1:]
                alternating = torch.stack(halves, 2).flatten(1, 2)
                blocks.append(alternating[:, first % 2 : first % 2 + count])
            return torch.cat(blocks)
        outputs = of_rows(slice(rows.start, min(rows.stop, m)))
        if rows.stop > m:
            # The last row is the sum of all others, which are computed in blocks of this height.
            step = rows.stop - rows.start
            heights = [slice(row, min(row + step, m)) for row in range(0, m, step)]
            sums = [of_rows(part)[0].sum(1, keepdim=True, dtype=torch.float64) for part in heights]
            outputs = [torch.cat([outputs[0], torch.stack(sums).sum(0).float()], 1)]
        return torch.cat(outputs[block.batches])

    def tolerance(self, problem: Problem, *, fast_accumulation: bool) -> Tolerance:
        """The bare product's, with growth of the drift of sums in the tensor core."""
        operation = problem.operation
        bounds = partial(_bare(operation).tolerance, problem)
        exact = bounds(fast_accumulation=False)
        growth = _DRIFT_OF_GATE if operation.epilogue.is_gated else _DRIFT
        drift = growth * (bounds(fast_accumulation=fast_accumulation).error - exact.error)
        bound = fp8_output.rounded(problem, exact) if operation.stores_fp8 else exact
        error, largest = bound.error + drift, bound.max_error + drift
        return replace(bound, error=error, max_error=largest, amax=bound.amax + drift)

    def defaults(self, problem: Problem) -> Sequence[Way]:
        return _ways(problem.operation)[0](problem)

    def alternatives(self, problem: Problem) -> Sequence[Way]:
        return _ways(problem.operation)[1](problem)


def _bare(operation: Operation) -> Workload:
    if operation.is_grouped:
        return Grouped()
    return Scaled() if operation.is_scaled else Dense()


_Ways = Callable[[Problem], Sequence[Way]]


def _ways(operation: Operation) -> tuple[_Ways, _Ways]:
    """What gives the defaults, and the alternatives."""
    if operation.is_grouped:
        return grouped_epilogue_ways.defaults, grouped_epilogue_ways.alternatives
    if operation.epilogue.backward is not None:
        return backward_ways.defaults, backward_ways.alternatives
    return epilogue_ways.defaults, epilogue_ways.alternatives


def _in_rows(operation: Operation) -> bool:
    """Whether outputs lie side by side in the rows of one matrix."""
    backward = operation.epilogue.backward
    return operation.is_grouped or (backward is not None and backward.gated)


def _drawn(name: str, problem: Problem, count: int, source: RandomSource) -> Sequence[torch.Tensor]:
    """An operand of each set: a factor or an addend of columns, of rows, or of all elements."""
    operation, m, n = problem.operation, problem.m, problem.n
    if name == "row_scale" and operation.is_grouped:
        shares = torch.empty((count, 1, m, 1), device=source.place)
        return list(shares.uniform_(_LEAST_SHARE, 1.0, generator=source.generator))
    if name == "row_scale":
        return list(draw_factors((count, m, 1), 1.0, source)[:, None])
    backward = operation.epilogue.backward
    shape = (1, 1, n)
    if name in ("residual", "aux"):
        shape = (1, m, n * (backward.halves if backward else 1))
    size, element = math.prod(shape), operation.bias if name == "bias" else operation.d
    packed = empty(source, count, size, element)
    if name == "column_scale":
        drawn = draw_factors((1, *packed.shape), COLUMN_FACTOR, source)[0]
        signs = torch.empty_like(drawn).bernoulli_(0.5, generator=source.generator).mul_(2).sub_(1)
        packed.copy_(drawn * signs)
    else:
        fill(packed, element, BIAS_SIGMA if name == "bias" else MATRIX_SIGMA, source)
    return [row[:size].view(shape) for row in packed]


def _outputs(
    problem: Problem, operands: OperandSet, columns: slice, rows: slice
) -> list[torch.Tensor]:
    """A block of each output, [1, rows, columns], without the row of sums."""
    operation, epilogue, width = problem.operation, problem.operation.epilogue, problem.columns
    multiply, backward = partial(_bare(operation).product, problem, operands), epilogue.backward
    first = Block(batches=slice(0, 1), rows=rows, columns=columns)
    second = replace(first, columns=slice(columns.start + width, columns.stop + width))
    product = multiply(first)
    if epilogue.is_gated:
        product = torch.cat([product, multiply(second)], -1)

    def read(name: str) -> torch.Tensor:
        operand = drawn_with(getattr(operands, name))
        blocks = (first, second) if operand.shape[2] > problem.n else (first,)
        return torch.cat([_within(block, operand) for block in blocks], -1).to(product.dtype)

    factors = read("row_scale") if operation.is_grouped else operands.scale_d

    def scaled(value: torch.Tensor) -> torch.Tensor:
        return value if factors is None else value * factors

    if backward is None:
        value, aux = follow(epilogue.steps, product, {by: read(by) for by in epilogue.operands})
        stored = () if aux is None else aux.chunk(2 if epilogue.is_gated else 1, -1)
        return [scaled(value), *stored]
    outputs = [*gradients(backward, scaled(product), read("aux"))]
    if backward.activated:
        outputs.append(scaled(activated(backward, read("aux"))))
    return outputs


def _within(block: Block, operand: torch.Tensor) -> torch.Tensor:
    """The block's part of an operand: [1, m, n], or a vector, which has an extent of 1."""
    _, m, n = operand.shape
    rows = slice(None) if m == 1 else block.rows
    return operand[:, rows, slice(None) if n == 1 else block.columns]


def _fault_of_sums(operands: OperandSet, written: int, bound: float) -> str | None:
    """What is wrong with the sums that a launch wrote, by those of the gradient of up times up.

    The kernel rounds that gradient, but not its sums. So the difference is compared with the norm
    of all terms: a sum itself may cancel to nothing.
    """
    up_gradient, aux = operands.d[1], drawn_with(operands.aux)[0]
    shares, n = drawn_with(operands.row_scale)[0], up_gradient.shape[1]
    sums, squares = drawn_with(operands.row_gradient), up_gradient.new_zeros(2, dtype=torch.float64)
    for first in range(0, written, _SUMMED_ROWS):
        rows = slice(first, min(first + _SUMMED_ROWS, written))
        terms = up_gradient[rows].double() * aux[rows, n:].double() / shares[rows]
        difference = sums[rows].sum(-1) - terms.sum(-1)
        squares += torch.stack([difference.square().sum(), terms.square().sum()])
    differences, all_terms = squares.sqrt().tolist()
    if not differences <= bound * all_terms:  # also true of NaN
        error = differences / all_terms if all_terms else math.inf
        return f"the sums of the factors' gradients have relative error {error:.2e}"
    if not bool(sums[written:].isnan().all()):
        return "sums of rows after the last group's were written"
    return None


# What the distributions of operands make of D's.


def _sigmas(operation: Operation, product: float, factor: float) -> tuple[float, ...]:
    """Root mean squares of the outputs; `product` is the bare product's, `factor` an FP8 D's."""
    epilogue, share = operation.epilogue, _size("share") if operation.is_grouped else 1.0
    if (parts := epilogue.backward) is None:
        value, argument = _followed(operation, product)
        # aux is what follows the addends, or what column factors multiply.
        stored = (argument,) * (epilogue.outputs - 1)
        return (value * share * factor, *stored)
    value, slope = spread(parts.activation, 1.0), _slope_spread(parts.activation)
    # The squares of the row of sums add up to as much as those of all other rows together.
    gradient = product * slope * (math.sqrt(2.0) if parts.bias_gradient else 1.0)
    sigmas = (gradient, *((product * value,) if parts.gated else ()))
    return tuple(share * sigma for sigma in (*sigmas, *((value,) if parts.activated else ())))


def _followed(operation: Operation, sigma: float) -> tuple[float, float]:
    """Root mean squares of D and of aux, or of what precedes an activation; `sigma` is P's."""
    argument = sigma
    for step in operation.epilogue.steps:
        match step.kind:
            case StepKind.ADD:
                sigma = math.hypot(sigma, _size(step.by))
            case StepKind.MULTIPLY:
                sigma *= _size(step.by)
            case StepKind.STORE:
                argument = sigma
            case StepKind.APPLY:
                argument, sigma = sigma, spread(Activation(step.by), sigma)
            case StepKind.GATE:
                sigma *= spread(Activation(step.by), sigma)
    return sigma, argument


@cache
def _size(name: str) -> float:
    """The root mean square of an operand."""
    factor = _root_mean_square(lambda x: torch.exp(FACTOR_SPREAD * x))
    low = _LEAST_SHARE
    return {
        "row_scale": factor,
        "column_scale": COLUMN_FACTOR * factor,
        "bias": BIAS_SIGMA,
        "residual": MATRIX_SIGMA,
        # The mean square of a uniform variable between a and 1 is (1 + a + a²) / 3.
        "share": math.sqrt((1 + low + low * low) / 3),
    }[name]


def _largest(operation: Operation, product: float) -> float:
    """D's largest absolute value within SIGMAS of its distribution, which FP8 must hold."""
    steps = operation.epilogue.steps
    last = [step for step in steps if step.kind in (StepKind.APPLY, StepKind.GATE)]
    value, argument = _followed(operation, product)
    sigma = argument if last else value
    x = torch.tensor([-sigma, sigma], dtype=torch.float64) * fp8_output.SIGMAS
    d, _ = follow(last, torch.cat([x, x]) if operation.epilogue.is_gated else x, {})
    return float(d.abs().max())


def spread(activation: Activation, sigma: float) -> float:
    return _root_mean_square(lambda x: ACTIVATIONS[activation](x * sigma))


def _slope_spread(activation: Activation) -> float:
    return _root_mean_square(lambda x: through(activation, torch.ones_like(x), x))


def _root_mean_square(function: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """Root mean square of a function's values, for arguments from N(0, 1)."""
    x = torch.linspace(-8.0, 8.0, 4001, dtype=torch.float64)
    weights = torch.exp(-x.square() / 2)
    return math.sqrt(float((function(x).square() * weights).sum() / weights.sum()))
