"""Products of gate and up that are combined to one D: SwiGLU, GeGLU.

B holds the gate's columns and then up's, like the weight of models that store both in one; a kernel
reads them by two pointers. The operands are those of the bare product, so gate and up are
independent and near N(0, 1), and D has large values where both are large.

If gate and up are stored as well, the outputs are one tensor [3, M, I]: D, and then aux as it lies
in memory, every row of 2·I as two rows of I. So all of them are poisoned, compared with their own
reference, and compared with a second run.

The reference is computed in FP32 without intermediate rounding. Tolerances are those of the bare
product, which bound one rounding of D. If FP8 sums stay in the tensor core, gate and up both drift,
and the gate's drift passes through the activation (`tuner.workloads.fused`). For a D in FP8 see
`tuner.workloads.fp8_output`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from gemmsmith.core.activations import ACTIVATIONS
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import Problem
from gemmsmith.runtime.abi import Arguments
from tuner.workloads import epilogue_ways, fp8_output
from tuner.workloads.epilogue_ways import activation_of
from tuner.workloads.fused import bare, carried, peak, spread
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
"""Growth of the drift in a product of two independent drifts: √(1 + 1.25²), rounded up."""


class Gated:
    """bf16, fp16 and FP8 (one factor per operand) products of gate and up."""

    def covers(self, operation: Operation) -> bool:
        return operation.epilogue.is_gated and not operation.is_grouped

    def draw(self, problem: Problem, count: int, source: RandomSource) -> Drawn:
        """The bare product's sets. D has half of its columns."""
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
        """The C ABI's arguments of a set with output `d`, which includes aux."""
        arguments = bare(problem.operation).arguments(problem, operands, d)
        arguments.b_up = operands.b[:, :, problem.columns :].data_ptr()
        if problem.operation.epilogue.stores_aux:
            arguments.aux, arguments.ld_aux = d[1].data_ptr(), problem.n
        if problem.operation.stores_fp8:
            fp8_output.set_addresses(arguments, operands)
        return arguments

    def precision(self, problem: Problem) -> torch.dtype:
        return bare(problem.operation).precision(problem)

    def product(self, problem: Problem, operands: OperandSet, block: Block) -> torch.Tensor:
        """A block of D and of the rows of aux."""
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
        return carried(problem, _DRIFT, fast_accumulation=fast_accumulation)

    def defaults(self, problem: Problem) -> Sequence[Way]:
        return epilogue_ways.defaults(problem)

    def alternatives(self, problem: Problem) -> Sequence[Way]:
        return epilogue_ways.alternatives(problem)


def _halves(
    problem: Problem, operands: OperandSet, block: Block
) -> tuple[torch.Tensor, torch.Tensor]:
    """A block of the gate and of up, each [1, rows, columns]."""
    product = bare(problem.operation).product
    half = problem.columns
    gate = replace(block, batches=slice(0, 1))
    up = replace(gate, columns=slice(block.columns.start + half, block.columns.stop + half))
    return product(problem, operands, gate), product(problem, operands, up)
