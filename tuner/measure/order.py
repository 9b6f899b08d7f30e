"""Whether a candidate gives the bits of the order that its operation demands.

Two things are compared, both of the launch that was verified already. First, rows of D are computed
again among others: fewer rows and more, in another order, some twice, and with rows of zeros after
them. Second, rows of D are those of the first candidate of the same order on this bench. Every
difference is the candidate's failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import lcm
from typing import Any

import torch

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.problem import Problem
from tuner.trial import Failure, FailureKind
from tuner.workloads.operands import Operands, bits
from tuner.workloads.workload import OperandSet

Run = Callable[[Problem, OperandSet], None]
"""Enqueues a launch on these operands."""

COMPARED = 64
"""Rows that are compared with those of other candidates, at most; they bound the memory."""

FEWEST = 192
"""Rows of the largest launch, at least: a problem of few rows is computed among more, too."""

_ZEROS = (0, 3, 0, 8, 1, 0)
"""Rows of zeros after those of each launch."""

_ROW_OPERANDS = ("a", "residual", "aux", "row_scale", "scale_a")


class RowBits:
    """The bits of one bench's problem, whose operation demands an order."""

    def __init__(self, operands: Operands, seed: int) -> None:
        self._operands = operands
        self._set = operands.cases[0].operands
        self._draw = torch.Generator().manual_seed(seed)
        m = operands.problem.m
        self._compared = torch.linspace(0, m - 1, min(m, COMPARED)).round().long()
        self._reference: tuple[str, torch.Tensor] | None = None

    def failure(self, candidate: Candidate, run: Run) -> Failure | None:
        """How the candidate's bits differ; None if they do not.

        The candidate's D lies in the first case's operands. `run` launches it on others.
        """
        problem, whole = self._operands.problem, self._rows(self._set.d)
        alignment = 1
        if not problem.layout.a_row_major:  # columns of A are copied by as many rows at once
            alignment = lcm(candidate.kernel.alignment_a, 8)
        for rows, zeros in self._launches():
            m = len(rows) + zeros + -(len(rows) + zeros) % alignment
            again = self._of_rows(rows, m)
            run(replace(problem, m=m), again)
            differing = int((self._rows(again.d)[:, : len(rows)] != whole[:, rows]).sum())
            if differing:
                return Failure(
                    kind=FailureKind.OTHER_BITS,
                    message=f"{differing} elements of {len(rows)} rows differ in a launch of {m} "
                    f"rows from those in one of {problem.m}: bits depend on M or on the row",
                )
        own = whole[:, self._compared.to(whole.device)].clone()
        if self._reference is None:
            self._reference = candidate.key, own
        name, reference = self._reference
        if differing := int((own != reference).sum()):
            return Failure(
                kind=FailureKind.OTHER_BITS,
                message=f"{differing} elements of {own.shape[1]} rows differ from those of {name}, "
                f"which adds in the same order, {candidate.summation}",
            )
        return None

    def _launches(self) -> Iterator[tuple[torch.Tensor, int]]:
        """Rows of the problem to compute again, and how many rows of zeros follow them."""
        m = self._operands.problem.m
        most = max(m, FEWEST)
        counts = (1, min(m, 7), 33, 130, m // 2 + 1, most)
        for count, zeros in zip(
            sorted({min(count, most) for count in counts}), _ZEROS, strict=False
        ):
            # Random rows, some of them twice where there are more than the problem has.
            drawn = torch.randperm(max(m, count), generator=self._draw)[:count] % m
            yield drawn.to(self._set.a.device), zeros

    def _of_rows(self, rows: torch.Tensor, m: int) -> OperandSet:
        """Operands of `m` rows: copies of these, then rows of zeros."""
        problem, operands = self._operands.problem, self._set
        chosen: dict[str, Any] = {
            name: _padded(operand, rows, m, by_rows=name != "a" or problem.layout.a_row_major)
            for name in _ROW_OPERANDS
            if (operand := getattr(operands, name)) is not None and operand.dim() == 3
        }
        return replace(operands, d=self._output(rows, m), **chosen)

    def _output(self, rows: torch.Tensor, m: int) -> torch.Tensor:
        """An output of `m` rows that lies as the whole one does, with its initial values."""
        d = self._set.d
        matrices, _, columns = d.shape
        if d.stride(0) < d.stride(1):  # the matrices' rows alternate
            output = d.new_empty((m, matrices, columns)).transpose(0, 1)
        else:
            output = d.new_empty((matrices, m, columns))
        self._operands.ready_rows(output, rows)
        return output

    def _rows(self, d: torch.Tensor) -> torch.Tensor:
        """An output's bits as [matrices, m, columns]: all of a row's elements in that row."""
        epilogue = self._operands.problem.operation.epilogue
        if not (epilogue.is_gated and epilogue.stores_aux):
            return bits(d)
        # Rows of aux are gate, up, gate, up …: two for each row.
        value, aux = bits(d[:1]), bits(d[1:])
        return torch.cat([value, aux.reshape(d.shape[1], 2, -1).transpose(0, 1)])


def _padded(operand: torch.Tensor, rows: torch.Tensor, m: int, *, by_rows: bool) -> torch.Tensor:
    """These rows of an operand, then rows of zeros: `m` rows, row-major or column-major."""
    matrices, _, columns = operand.shape
    source = bits(operand)
    if by_rows:
        padded = source.new_zeros((matrices, m, columns))
    else:
        padded = source.new_zeros((matrices, columns, m)).transpose(1, 2)
    padded[:, : len(rows)] = source[:, rows]
    return padded.view(operand.dtype)
