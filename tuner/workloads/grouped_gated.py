"""Grouped products of gate and up that are combined to one D: the first half of a layer of experts.

Every token's row of D has a factor, the router's share for its expert, drawn between 1/32 and 1. If
gate and up are stored as well, a row of memory holds D, gate and up side by side, so that the rows
of tokens without a group stay unchanged in all three.

Everything else is as for grouped products (`tuner.workloads.grouped`) and gated products
(`tuner.workloads.gated`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from gemmsmith.core.activations import ACTIVATIONS
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import Problem
from gemmsmith.runtime.abi import Arguments
from tuner.workloads import grouped_gated_ways
from tuner.workloads.epilogue_ways import activation_of
from tuner.workloads.fused import spread
from tuner.workloads.grouped import Grouped
from tuner.workloads.matrices import laid_in_rows
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

_LEAST_SHARE = 1 / 32


class GroupedGated:
    """bf16 and fp16 products of gate and up, by rows."""

    def covers(self, operation: Operation) -> bool:
        return operation.is_grouped and operation.epilogue.is_gated

    def draw(self, problem: Problem, count: int, source: RandomSource) -> Drawn:
        """The grouped product's sets, with a factor for every row."""
        drawn = Grouped().draw(problem, count, source)
        shares = draw_shares(drawn.sets, problem, source)

        def completed(operands: OperandSet) -> OperandSet:
            row_scale = shares[operands.a.data_ptr()]
            return replace(operands, d=laid_in_rows(operands.d), row_scale=row_scale)

        share = root_mean_square_of_shares()
        activation, stores = activation_of(problem), problem.operation.epilogue.stores_aux
        cases = []
        for case in drawn.cases:
            (product,) = case.sigmas
            value = share * spread(activation, product) * product
            sigmas = (value, product, product) if stores else (value,)
            cases.append(replace(case, operands=completed(case.operands), sigmas=sigmas))
        return with_cases(drawn, completed, cases)

    def arguments(self, problem: Problem, operands: OperandSet, d: torch.Tensor) -> Arguments:
        """The C ABI's arguments of a set with output `d`, with aux beside it."""
        arguments = arguments_in_rows(problem, operands, d)
        arguments.b_up = operands.b[:, :, problem.columns :].data_ptr()
        if problem.operation.epilogue.stores_aux:
            arguments.aux, arguments.ld_aux = d[1].data_ptr(), d.stride(1)
        return arguments

    def precision(self, problem: Problem) -> torch.dtype:
        return Grouped().precision(problem)

    def product(self, problem: Problem, operands: OperandSet, block: Block) -> torch.Tensor:
        """A block of D, gate and up."""
        half = problem.columns
        columns = slice(block.columns.start + half, block.columns.stop + half)
        bare = replace(block, batches=slice(0, 1))
        gate = Grouped().product(problem, operands, bare)
        up = Grouped().product(problem, operands, replace(bare, columns=columns))
        value = ACTIVATIONS[activation_of(problem)](gate) * up
        value *= drawn_with(operands.row_scale)[:, block.rows]
        outputs = [value, gate, up]
        return torch.cat(outputs[block.batches])

    def tolerance(self, problem: Problem, *, fast_accumulation: bool) -> Tolerance:
        return Grouped().tolerance(problem, fast_accumulation=fast_accumulation)

    def defaults(self, problem: Problem) -> Sequence[Way]:
        return grouped_gated_ways.defaults(problem)

    def alternatives(self, problem: Problem) -> Sequence[Way]:
        return grouped_gated_ways.alternatives(problem)


def root_mean_square_of_shares() -> float:
    # The mean square of a uniform variable between a and 1 is (1 + a + a²) / 3.
    low = _LEAST_SHARE
    return float(((1 + low + low * low) / 3) ** 0.5)


def draw_shares(
    sets: Sequence[OperandSet], problem: Problem, source: RandomSource
) -> dict[int, torch.Tensor]:
    """Factors of rows, [1, M, 1], by the address of A: sets that share memory share them too."""
    addresses = list(dict.fromkeys(operands.a.data_ptr() for operands in sets))
    shares = torch.empty((len(addresses), problem.m, 1), device=source.place)
    shares.uniform_(_LEAST_SHARE, 1.0, generator=source.generator)
    return {address: shares[i : i + 1] for i, address in enumerate(addresses)}


def with_cases(
    drawn: Drawn, completed: Callable[[OperandSet], OperandSet], cases: Sequence[Case]
) -> Drawn:
    """The sets completed, and the check laid as they are, with these cases."""
    return replace(
        drawn,
        sets=tuple(map(completed, drawn.sets)),
        check=laid_in_rows(drawn.check),
        sigma=cases[0].sigmas[0],
        cases=tuple(cases),
    )


def arguments_in_rows(problem: Problem, operands: OperandSet, d: torch.Tensor) -> Arguments:
    """The grouped product's arguments with outputs of `laid_in_rows` and factors of rows."""
    arguments = Grouped().arguments(problem, operands, d)
    arguments.ldc = arguments.ldd = d.stride(1)
    arguments.row_scale = drawn_with(operands.row_scale).data_ptr()
    return arguments
