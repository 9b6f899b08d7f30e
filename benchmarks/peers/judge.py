"""Compares an output with the workload's reference of the same operands.

The bounds are the tuner's (tuner/workloads/reference.py). For FP8 they are those of fast
accumulation, which every library uses here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tuner.workloads.operands import Operands, untouched
from tuner.workloads.reference import tolerance, use_precise_fp32
from tuner.workloads.workload import Block

if TYPE_CHECKING:
    from benchmarks.peers.peer import Launch


class Judge:
    """Holds the reference of the first operand set, in higher precision."""

    def __init__(self, operands: Operands) -> None:
        import torch

        use_precise_fp32()
        first = operands.sets[0]
        self._operands, self._d = operands, first.d
        matrices, m, n = first.d.shape
        precision = operands.workload.precision(operands.problem)
        self._reference = torch.empty(first.d.shape, dtype=precision, device=first.d.device)
        for entry in range(matrices):
            whole = Block(batches=slice(entry, entry + 1), rows=slice(0, m), columns=slice(0, n))
            self._reference[entry] = operands.expected(first, whole)[0]
        self._bound = tolerance(
            operands.problem, fast_accumulation=operands.problem.operation.is_narrow_float
        )
        self.error = 0.0

    def wrong(self, launch: Launch) -> str | None:
        """Say why launch 0's output is wrong; None if it is right. Sets `error` (Frobenius)."""
        import torch

        self._operands.ready(self._d)
        output = launch(0).reshape(self._reference.shape)
        difference = self._reference - output
        figures = torch.stack(
            [
                torch.linalg.vector_norm(difference),
                torch.linalg.vector_norm(self._reference),
                torch.linalg.vector_norm(difference, float("inf")),
                torch.linalg.vector_norm(self._reference, float("inf")),
                untouched(output).to(difference.dtype),
            ]
        ).tolist()
        self.error, largest = figures[0] / figures[1], figures[2] / figures[3]
        if figures[4]:
            return f"{figures[4]:.0f} output elements were never written"
        if not (self.error <= self._bound.error and largest <= self._bound.max_error):
            return (
                f"error {self.error:.2e} (bound {self._bound.error:.2e}), largest "
                f"{largest:.2e} (bound {self._bound.max_error:.2e}) against the reference"
            )
        return None
