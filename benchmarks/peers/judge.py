"""Whether an output is the product: compared with torch's FP32 product of the same operands.

The bounds are the tuner's own (tuner/measure/reference.py), for FP8 those of fast accumulation:
that is what every library is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tuner.measure.operands import POISON, Operands, poison
from tuner.measure.reference import tolerance, use_precise_fp32

if TYPE_CHECKING:
    from benchmarks.peers.peer import Launch


class Judge:
    """Holds the FP32 product of the first operand set."""

    def __init__(self, operands: Operands) -> None:
        import torch

        use_precise_fp32()
        first = operands.sets[0]
        self._d = first.d
        scale = operands.scale_values[0] * operands.scale_values[1]
        self._wanted = torch.empty(first.d.shape, dtype=torch.float32, device=first.d.device)
        for entry in range(operands.problem.batch):
            torch.mm(first.a[entry].float(), first.b[entry].float(), out=self._wanted[entry])
        self._wanted.mul_(scale)
        self._bound = tolerance(
            operands.problem, fast_accumulation=operands.problem.operation.is_narrow_float
        )
        self.error = 0.0

    def wrong(self, launch: Launch) -> str | None:
        """Why launch 0's output is wrong; None if it is right. Leaves `error` (Frobenius)."""
        import torch

        poison(self._d)
        output = launch(0).reshape(self._wanted.shape)
        untouched = (output.view(torch.int16) == POISON).sum()
        difference = output.float().sub_(self._wanted)
        figures = torch.stack(
            [
                torch.linalg.vector_norm(difference),
                torch.linalg.vector_norm(self._wanted),
                torch.linalg.vector_norm(difference, float("inf")),
                torch.linalg.vector_norm(self._wanted, float("inf")),
                untouched.float(),
            ]
        ).tolist()
        self.error, largest = figures[0] / figures[1], figures[2] / figures[3]
        if figures[4]:
            return f"{figures[4]:.0f} output elements were never written"
        if not (self.error <= self._bound.error and largest <= self._bound.max_error):
            return (
                f"error {self.error:.2e} (bound {self._bound.error:.2e}), largest "
                f"{largest:.2e} (bound {self._bound.max_error:.2e}) against FP32"
            )
        return None
