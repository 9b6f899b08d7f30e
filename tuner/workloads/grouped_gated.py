"""Grouped products whose gate and up make one D: the first half of a layer of experts.

Each token's row of D has a factor, the router's share of its expert, drawn between 1/32 and 1.
Where gate and up are stored as well, each row of memory has D, gate and up side by side, so that
rows of tokens of no group stay as they are in all three.

All else is as of grouped products (`tuner.workloads.grouped`) and of gates
(`tuner.workloads.gated`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from gemmsmith.core.activations import ACTIVATIONS
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import Problem
from gemmsmith.runtime.abi import Arguments
from tuner.workloads import grouped_gated_ways
from tuner.workloads.fused import spread
from tuner.workloads.gated_ways import activation_of
from tuner.workloads.grouped import Grouped
from tuner.workloads.workload import (
    Block,
    Drawn,
    OperandSet,
    RandomSource,
    Tolerance,
    Way,
    drawn_with,
)

_LEAST_SHARE = 1 / 32


class GroupedGated:
    """bf16 and fp16 products of gate and up, by rows."""

    def covers(self, operation: Operation) -> bool:
        """Whether the operation is of this family."""
        return operation.is_grouped and operation.epilogue.is_gated

    def draw(self, problem: Problem, count: int, source: RandomSource) -> Drawn:
        """The grouped product's sets, each with a factor for every row."""
        drawn = Grouped().draw(problem, count, source)
        memory = {each.a.data_ptr(): each for each in drawn.sets}
        shares = torch.empty((len(memory), problem.m, 1), device=source.place)
        shares.uniform_(_LEAST_SHARE, 1.0, generator=source.generator)
        of_memory = {at: shares[i : i + 1] for i, at in enumerate(memory)}

        def completed(operands: OperandSet) -> OperandSet:
            at = operands.a.data_ptr()
            return replace(operands, d=_laid(operands.d), row_scale=of_memory[at])

        share = root_mean_square_of_shares()
        activation, stores = activation_of(problem), problem.operation.epilogue.stores_aux
        cases = []
        for case in drawn.cases:
            (product,) = case.sigmas
            value = share * spread(activation, product) * product
            sigmas = (value, product, product) if stores else (value,)
            cases.append(replace(case, operands=completed(case.operands), sigmas=sigmas))
        return replace(
            drawn,
            sets=tuple(map(completed, drawn.sets)),
            check=_laid(drawn.check),
            sigma=cases[0].sigmas[0],
            cases=tuple(cases),
        )

    def arguments(self, problem: Problem, operands: OperandSet, d: torch.Tensor) -> Arguments:
        """The C ABI's arguments of a set with output `d`, and aux beside it."""
        arguments = Grouped().arguments(problem, operands, d)
        leading = d.stride(1)
        arguments.ldc = arguments.ldd = leading
        arguments.b_up = operands.b[:, :, problem.columns :].data_ptr()
        arguments.row_scale = drawn_with(operands.row_scale).data_ptr()
        if problem.operation.epilogue.stores_aux:
            arguments.aux, arguments.ld_aux = d[1].data_ptr(), leading
        return arguments

    def precision(self, problem: Problem) -> torch.dtype:
        """As without a gate."""
        return Grouped().precision(problem)

    def product(self, problem: Problem, operands: OperandSet, block: Block) -> torch.Tensor:
        """That block of D, gate and up."""
        half, one = problem.columns, slice(0, 1)
        columns = slice(block.columns.start + half, block.columns.stop + half)
        bare = replace(block, batches=one)
        gate = Grouped().product(problem, operands, bare)
        up = Grouped().product(problem, operands, replace(bare, columns=columns))
        value = ACTIVATIONS[activation_of(problem)](gate) * up
        value *= drawn_with(operands.row_scale)[:, block.rows]
        outputs = [value, gate, up]
        return torch.cat(outputs[block.batches])

    def tolerance(self, problem: Problem, *, fast_accumulation: bool) -> Tolerance:
        """As of the grouped product: D is rounded once."""
        return Grouped().tolerance(problem, fast_accumulation=fast_accumulation)

    def defaults(self, problem: Problem) -> Sequence[Way]:
        """The grouped call, then torch's eager kernels."""
        return grouped_gated_ways.defaults(problem)

    def alternatives(self, problem: Problem) -> Sequence[Way]:
        """Compiled code, and one pass of the library's own: no kernel is run that loses to them."""
        return grouped_gated_ways.alternatives(problem)


def root_mean_square_of_shares() -> float:
    """Of factors that are drawn evenly between the least and 1."""
    low = _LEAST_SHARE
    return float(((1 + low + low * low) / 3) ** 0.5)


def _laid(d: torch.Tensor) -> torch.Tensor:
    """Packed outputs side by side in the rows of one matrix."""
    outputs, m, n = d.shape
    return d.as_strided((outputs, m, n), (n, outputs * n, 1))
