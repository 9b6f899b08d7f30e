"""Products whose gate and up make one D: SwiGLU, GeGLU.

B holds the gate's columns and then up's, as models that store both in one weight have them; a
kernel reads them by two pointers. Operands are those of the bare product, so gate and up are
independent and near N(0, 1), and D is drawn wide where both are large.

Where gate and up are stored as well, the outputs are one tensor [3, M, I]: D, and then aux as it
lies in memory, each of its rows of 2·I as two rows of I. So all of them are poisoned, compared with
their own reference, and with a second run.

The reference is computed in FP32 and rounded nowhere on its way. Tolerances are those of the bare
product, on rounding D once; of FP8 sums that stay in the tensor core gate and up have a drift each,
and the gate's is carried through the activation (`tuner.workloads.fused`).
Of a D in FP8 see `tuner.workloads.fp8_output`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from gemmsmith.core.activations import ACTIVATIONS
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import Problem
from gemmsmith.runtime.abi import Arguments
from tuner.workloads import fp8_output, fp8_ways, gated_ways
from tuner.workloads.fused import bare, carried, peak, spread
from tuner.workloads.gated_ways import activation_of
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

_DRIFT = 1.75
"""Of a product of two drifts that have nothing to do with each other: √(1 + 1.25²), rounded up."""


class Gated:
    """bf16, fp16 and FP8 (one factor for each operand) products of gate and up."""

    def covers(self, operation: Operation) -> bool:
        """Whether the operation is of this family."""
        return operation.epilogue.is_gated and not operation.is_grouped

    def draw(self, problem: Problem, count: int, source: RandomSource) -> Drawn:
        """The bare product's sets, with D's own columns."""
        drawn = bare(problem.operation).draw(problem, count, source)
        sigma = spread(activation_of(problem), drawn.sigma) * drawn.sigma
        stored = (drawn.sigma,) * 2 if problem.operation.epilogue.stores_aux else ()
        sets = drawn.sets
        if problem.operation.stores_fp8:
            largest = peak(activation_of(problem), drawn.sigma) * peak(None, drawn.sigma)
            sets, factor = fp8_output.with_factor(sets, largest, source)
            sigma *= factor
        case = Case(operands=sets[0], written=problem.m, sigmas=(sigma, *stored))
        return replace(drawn, sets=sets, sigma=sigma, cases=(case,))

    def arguments(self, problem: Problem, operands: OperandSet, d: torch.Tensor) -> Arguments:
        """The C ABI's arguments of a set with output `d`, and aux behind it."""
        arguments = bare(problem.operation).arguments(problem, operands, d)
        arguments.b_up = operands.b[:, :, problem.columns :].data_ptr()
        if problem.operation.epilogue.stores_aux:
            arguments.aux, arguments.ld_aux = d[1].data_ptr(), problem.n
        if problem.operation.stores_fp8:
            fp8_output.tell(arguments, operands)
        return arguments

    def precision(self, problem: Problem) -> torch.dtype:
        """As of the bare product."""
        return bare(problem.operation).precision(problem)

    def product(self, problem: Problem, operands: OperandSet, block: Block) -> torch.Tensor:
        """That block of D, and of the rows of aux behind it."""
        outputs = []
        for matrix in range(block.batches.start, block.batches.stop):
            if matrix == 0:
                gate, up = _halves(problem, operands, block)
                value = ACTIVATIONS[activation_of(problem)](gate) * up
                stores_fp8 = problem.operation.stores_fp8
                outputs.append(value * drawn_with(operands.scale_d) if stores_fp8 else value)
                continue
            # Rows of aux are gate, up, gate, up …: two for each token.
            first = (matrix - 1) * problem.m + block.rows.start
            count = block.rows.stop - block.rows.start
            tokens = slice(first // 2, (first + count + 1) // 2)
            halves = _halves(problem, operands, replace(block, rows=tokens))
            rows = torch.stack(halves, 2).flatten(1, 2)
            outputs.append(rows[:, first % 2 : first % 2 + count])
        return torch.cat(outputs)

    def tolerance(self, problem: Problem, *, fast_accumulation: bool) -> Tolerance:
        """See the module."""
        return carried(problem, _DRIFT, fast_accumulation=fast_accumulation)

    def defaults(self, problem: Problem) -> Sequence[Way]:
        """The product of both by torch's call, then torch's eager kernels."""
        ways = gated_ways.defaults(problem)
        return fp8_ways.defaults(ways) if problem.operation.stores_fp8 else ways

    def alternatives(self, problem: Problem) -> Sequence[Way]:
        """The best sequences that there are without us, which a winner beats as well."""
        if problem.operation.stores_fp8:
            return fp8_ways.alternatives(problem)
        return gated_ways.alternatives(problem)


def _halves(
    problem: Problem, operands: OperandSet, block: Block
) -> tuple[torch.Tensor, torch.Tensor]:
    """That block of the gate and of up, [1, rows, columns] each."""
    product = bare(problem.operation).product
    one, half = slice(0, 1), problem.columns
    up = slice(block.columns.start + half, block.columns.stop + half)
    return (
        product(problem, operands, replace(block, batches=one)),
        product(problem, operands, replace(block, batches=one, columns=up)),
    )
