"""Whether a candidate gives the bits of the order that its operation demands.

Two things are compared, both of a problem whose results were verified already. First, parts of it
are launched again among other things (`tuner.measure.relaunches`). Second, rows of D are those of
the first candidate of the same order on this bench. Every difference is the candidate's failure.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.problem import Problem
from tuner.measure.relaunches import relaunches, whole
from tuner.trial import Failure, FailureKind
from tuner.workloads.operands import Operands, bits
from tuner.workloads.workload import OperandSet

Run = Callable[[Problem, OperandSet], None]
"""Enqueues a launch on these operands."""

COMPARED = 64
"""Rows that are compared with those of other candidates, at most; they bound the memory."""


class RowBits:
    """The bits of one bench's problem, whose operation demands an order."""

    def __init__(self, operands: Operands, seed: int) -> None:
        self._operands = operands
        self._whole = whole(operands)
        self._generator = torch.Generator().manual_seed(seed)
        m = operands.problem.m
        self._compared = torch.linspace(0, m - 1, min(m, COMPARED)).round().long()
        self._reference: tuple[str, list[torch.Tensor]] | None = None

    def failure(self, candidate: Candidate, run: Run) -> Failure | None:
        """How the candidate's bits differ; None if they do not. `run` launches it."""
        problem = self._operands.problem
        self._operands.ready(self._whole.d)
        run(problem, self._whole)
        outputs = self._outputs(self._whole)
        for again in relaunches(self._operands, candidate.kernel.alignment_a, self._generator):
            run(again.problem, again.operands)
            parts = [output[again.at] for output in self._outputs(again.operands)]
            differing = _differing(parts, [output[again.of] for output in outputs])
            if differing:
                return Failure(
                    kind=FailureKind.OTHER_BITS,
                    message=f"{differing} elements of {again.parts}: bits depend on {again.cause}",
                )
        compared = self._compared.to(self._whole.d.device)
        own = [output[:, compared] for output in outputs]
        if self._reference is None:
            self._reference = candidate.key, own
        name, reference = self._reference
        if differing := _differing(own, reference):
            return Failure(
                kind=FailureKind.OTHER_BITS,
                message=f"{differing} elements of {len(compared)} rows differ from those of "
                f"{name}, which adds in the same order, {candidate.summation}",
            )
        return None

    def _outputs(self, operands: OperandSet) -> list[torch.Tensor]:
        """Bits of outputs, each [matrices, m, columns]: all of a row's elements in that row."""
        operation, d = self._operands.problem.operation, operands.d
        epilogue = operation.epilogue
        if operands.row_gradient is not None:
            return [bits(d), bits(operands.row_gradient)[None]]
        if not (epilogue.is_gated and epilogue.stores_aux) or operation.is_grouped:
            return [bits(d)]
        # Rows of aux are gate, up, gate, up …: two for each row.
        return [bits(d[:1]), bits(d[1:]).reshape(d.shape[1], 2, -1).transpose(0, 1)]


def _differing(some: list[torch.Tensor], others: list[torch.Tensor]) -> int:
    """Number of elements that differ."""
    return sum(int((a != b).sum()) for a, b in zip(some, others, strict=True))
