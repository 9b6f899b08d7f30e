"""Grouped products of the backward pass: the gradient of gate and up of a layer of experts.

The operands are those of the bare product, dY and the second weights. aux, gate and up of every
row, is drawn from N(0, 1), and the factor of every row as in the forward pass. All outputs lie side
by side in the rows of one matrix: the gradients of gate and up, and the activation's value. The
sums that add up to the factors' gradients are of another type, so they are examined apart, against
the gradient of up.

The default is what torch programs run in eager code. The finals time the same code through
`torch.compile`, and gemmsmith's own pass after the grouped product.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from gemmsmith.core.activations import ACTIVATIONS, FUNCTIONS, gate_gradients, through
from gemmsmith.core.epilogue import Activation, Backward
from gemmsmith.core.operation import Element, Operation
from gemmsmith.core.problem import Problem
from gemmsmith.runtime.abi import ROW_GRADIENT_COLUMNS, Arguments
from tuner.workloads import grouped_ways
from tuner.workloads.backward import slope_spread
from tuner.workloads.backward_ways import parts_of
from tuner.workloads.fused import spread
from tuner.workloads.grouped import Grouped
from tuner.workloads.grouped_gated import (
    arguments_in_rows,
    draw_shares,
    root_mean_square_of_shares,
    with_cases,
)
from tuner.workloads.grouped_gated_ways import products
from tuner.workloads.matrices import empty, fill, laid_in_rows
from tuner.workloads.ways import compiled, first_of
from tuner.workloads.workload import (
    Block,
    Drawn,
    Launch,
    OperandSet,
    RandomSource,
    Tolerance,
    Way,
    drawn_with,
)

_CHUNK_ROWS = 1024
"""Rows whose sums are examined at once."""


class GroupedBackward:
    """bf16 and fp16 products with a backward epilogue, by rows."""

    def covers(self, operation: Operation) -> bool:
        return operation.is_grouped and operation.epilogue.backward is not None

    def draw(self, problem: Problem, count: int, source: RandomSource) -> Drawn:
        """The grouped product's sets, with aux and factors; all launches write the same sums."""
        drawn, parts = Grouped().draw(problem, count, source), parts_of(problem)
        m, n, element = problem.m, problem.n, problem.operation.d
        addresses = list(dict.fromkeys(operands.a.data_ptr() for operands in drawn.sets))
        aux = empty(source, len(addresses), 2 * m * n, element)
        fill(aux, element, 1.0, source)
        by_address = dict(zip(addresses, aux[:, : 2 * m * n].view(-1, 1, m, 2 * n), strict=True))
        shares = draw_shares(drawn.sets, problem, source)
        slabs = -(-n // ROW_GRADIENT_COLUMNS)
        sums = torch.empty((m, slabs), dtype=torch.float32, device=source.place)

        def completed(operands: OperandSet) -> OperandSet:
            address = operands.a.data_ptr()
            return replace(
                operands,
                d=laid_in_rows(operands.d),
                aux=by_address[address],
                row_scale=shares[address],
                row_gradient=sums,
            )

        share = root_mean_square_of_shares()
        value, slope = spread(parts.activation, 1.0), slope_spread(parts.activation)
        cases = []
        for case in drawn.cases:
            (product,) = case.sigmas
            sigmas = (share * product * slope, share * product * value, share * value)
            operands = completed(case.operands)
            cases.append(
                replace(
                    case,
                    operands=operands,
                    sigmas=sigmas[: 2 + parts.activated],
                    beside=partial(_fault_of_sums, operands, case.written),
                )
            )
        return with_cases(drawn, completed, cases)

    def arguments(self, problem: Problem, operands: OperandSet, d: torch.Tensor) -> Arguments:
        """The C ABI's arguments of a set with the outputs `d`."""
        arguments = arguments_in_rows(problem, operands, d)
        arguments.aux, arguments.ld_aux = drawn_with(operands.aux).data_ptr(), 2 * problem.n
        arguments.row_gradient = drawn_with(operands.row_gradient).data_ptr()
        if parts_of(problem).activated:
            arguments.activated, arguments.ld_activated = d[2].data_ptr(), d.stride(1)
        return arguments

    def precision(self, problem: Problem) -> torch.dtype:
        return Grouped().precision(problem)

    def product(self, problem: Problem, operands: OperandSet, block: Block) -> torch.Tensor:
        """A block of the gradients of gate and up, and of the value."""
        activation, n = parts_of(problem).activation, problem.n
        rows = drawn_with(operands.row_scale)[:, block.rows]
        gradient = Grouped().product(problem, operands, replace(block, batches=slice(0, 1)))
        gradient *= rows
        aux = drawn_with(operands.aux)[:, block.rows]
        gate = aux[..., :n][..., block.columns].to(gradient.dtype)
        up = aux[..., n:][..., block.columns].to(gradient.dtype)
        value = ACTIVATIONS[activation](gate)
        of_gate = through(activation, gradient * up, gate)
        outputs = [of_gate, gradient * value, value * up * rows]
        return torch.cat(outputs[block.batches])

    def tolerance(self, problem: Problem, *, fast_accumulation: bool) -> Tolerance:
        return Grouped().tolerance(problem, fast_accumulation=fast_accumulation)

    def defaults(self, problem: Problem) -> Sequence[Way]:
        """Eager calls."""
        parts = parts_of(problem)
        value, gradient = FUNCTIONS[parts.activation].calls
        calls = f"then {value}, {gradient}, and products with up and factors"
        return tuple(
            Way(name=f"{way.name}, {calls}", launches=partial(_eager, way), takes=way.takes)
            for way in grouped_ways.defaults(problem)
        )

    def alternatives(self, problem: Problem) -> Sequence[Way]:
        """Sequences that may be faster than eager calls, if torch has a grouped kernel."""
        call = grouped_ways.defaults(problem)[0]
        if problem.operation.a is not Element.BF16 or not call.takes(problem):
            return ()
        ways = [Way.to_beat("torch.compile of the same", _compiled)]
        if parts_of(problem).activation is Activation.SILU:
            one_pass = f"{call.name}, then one pass of gemmsmith.experts"
            ways.append(Way.to_beat(one_pass, partial(_passed, call)))
        return ways


def _fault_of_sums(operands: OperandSet, written: int, bound: float) -> str | None:
    """What is wrong with the sums that a launch wrote, by those of the gradient of up times up.

    The kernel rounds that gradient, but not its sums. So the difference is compared with the norm
    of all terms: a sum itself may cancel to nothing.
    """
    up_gradient, aux = operands.d[1], drawn_with(operands.aux)[0]
    shares, n = drawn_with(operands.row_scale)[0], up_gradient.shape[1]
    sums, squares = drawn_with(operands.row_gradient), up_gradient.new_zeros(2, dtype=torch.float64)
    for first in range(0, written, _CHUNK_ROWS):
        rows = slice(first, min(first + _CHUNK_ROWS, written))
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


def _results(parts: Backward, s: OperandSet, product: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The gradient of gate, that of up, that of the factors, and the value."""
    aux = drawn_with(s.aux)[0]
    shares = drawn_with(s.row_scale)[0].to(product.dtype)
    gate, up = aux.chunk(2, -1)
    opened = ACTIVATIONS[parts.activation](gate) * up
    gradients = gate_gradients(parts.activation, product * shares, aux)
    results = (*gradients, (product * opened).sum(-1))
    return (*results, opened * shares) if parts.activated else results


def _eager(way: Way, problem: Problem, sets: Sequence[OperandSet], room: int) -> list[Launch]:
    parts = parts_of(problem)

    def run(multiply: Launch, s: OperandSet) -> torch.Tensor:
        return _results(parts, s, multiply().view(problem.m, -1))[0]

    return [partial(run, multiply, s) for s, multiply in products(way, problem, sets, room)]


def _compiled(problem: Problem, sets: Sequence[OperandSet], _: int) -> list[Launch]:
    parts = parts_of(problem)
    call = compiled(lambda s: _results(parts, s, grouped_ways.grouped_mm(s)))
    return [partial(first_of, call, s) for s in sets]


def _passed(way: Way, problem: Problem, sets: Sequence[OperandSet], room: int) -> list[Launch]:
    from gemmsmith.ops.products import passes  # imports torch's compiler, which takes seconds

    rows = torch.arange(problem.m, device=sets[0].d.device)
    needs = (True, True, parts_of(problem).activated)

    def run(multiply: Launch, s: OperandSet) -> torch.Tensor:
        used, shares = drawn_with(s.groups).offsets[-1:], drawn_with(s.row_scale)[0]
        product = multiply().view(problem.m, -1)
        both = passes.activate_backward(drawn_with(s.aux)[0], shares, rows, used, product, needs)
        return drawn_with(both.gate_up)[:, : problem.n]

    return [partial(run, multiply, s) for s, multiply in products(way, problem, sets, room)]
