"""The reference of a problem in higher precision, and the comparison of an output with it.

The reference is torch's product of the very operands the kernels read, in FP32 (TF32 off) where D
is rounded to 16 bits, else in FP64. It is computed once per batch of candidates, in blocks whose
wide copies stay within a bounded scratch, and kept when it fits in a share of memory, else
recomputed per candidate.

Tolerances are on ‖D - R‖ / ‖R‖ (Frobenius); each workload says which, and why. The largest single
error is bounded too (relative to the largest |R|), because one wrong tile among many thousands
hardly moves the norm. Where D has few elements both norms may be small by chance (cancellation);
they are floored at what the distribution of D predicts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from gemmsmith.answer import Correctness
from gemmsmith.kernel import AnyKernel
from gemmsmith.problem import Problem
from tuner.errors import ReferenceBroken
from tuner.trial import Failure, FailureKind
from tuner.workloads.footprint import CHUNK_ELEMENTS
from tuner.workloads.operands import Operands, bits, free_bytes, untouched
from tuner.workloads.registry import workload_of
from tuner.workloads.workload import Block, Tolerance

KEPT_BYTES = 8 * 2**30
"""A reference up to this size (2·10⁹ elements in FP32) is kept for the whole batch."""


def tolerance(problem: Problem, *, fast_accumulation: bool) -> Tolerance:
    """The bounds an output of this problem has to meet."""
    workload = workload_of(problem.operation)
    return workload.tolerance(problem, fast_accumulation=fast_accumulation)


class Reference:
    """What one launch of an operand set (the first) leaves in D, in higher precision.

    Raises:
        ReferenceBroken: it is not finite.
    """

    def __init__(self, operands: Operands) -> None:
        self.problem = operands.problem
        self._operands = operands
        self._blocks = tuple(_blocks(self.problem))
        elements = self.problem.m * self.problem.n * self.problem.batch
        precision = operands.workload.precision(self.problem)
        self._name = f"FP{8 * precision.itemsize}"
        keep = elements * precision.itemsize <= min(KEPT_BYTES, free_bytes(operands.ordinal) // 4)
        self._kept: list[torch.Tensor] = []
        figures = []
        for block in self._blocks:
            part = self._operands.wanted(block)
            figures += [
                torch.linalg.vector_norm(part),
                torch.linalg.vector_norm(part, float("inf")),
            ]
            if keep:
                self._kept.append(part)
        values = torch.stack(figures).tolist()
        self.norm = math.hypot(*values[0::2])
        self.peak = max(values[1::2])
        if not (math.isfinite(self.norm) and math.isfinite(self.peak)):
            raise ReferenceBroken(
                f"the {self._name} reference of {self.problem} is not finite though its inputs are "
                "plain normal samples; suspect this GPU or another process on it, and try again"
            )
        floor = tolerance(self.problem, fast_accumulation=False).floor
        self.norm = max(self.norm, floor * operands.sigma * math.sqrt(elements))
        self.peak = max(self.peak, operands.sigma)

    def check(
        self, kernel: AnyKernel, *, claims_order: bool
    ) -> tuple[Correctness, None] | tuple[None, Failure]:
        """Judge the first set's output, and `operands.check` as the same launch's second run.

        `claims_order`: the schedule sums in a fixed order, so other bits are a failure. One
        synchronization, whatever the size.
        """
        first, second = self._operands.sets[0].d, self._operands.check
        figures: list[torch.Tensor] = []
        for i, block in enumerate(self._blocks):
            part = block.of(first)
            wanted = self._kept[i] if self._kept else self._operands.wanted(block)
            difference = torch.sub(wanted, part)
            figures += [
                torch.linalg.vector_norm(difference),
                torch.linalg.vector_norm(difference, float("inf")),
                untouched(part).to(difference.dtype),
                (bits(part) != bits(block.of(second))).sum().to(difference.dtype),
            ]
        values = torch.stack(figures).tolist()
        error = _hypot(values[0::4]) / self.norm
        max_error = max(values[1::4]) / self.peak if error == error else math.nan
        unwritten, unequal = int(sum(values[2::4])), int(sum(values[3::4]))
        bound = tolerance(self.problem, fast_accumulation=kernel.keeps_short_sums)
        elements = self.problem.m * self.problem.n * self.problem.batch
        if unwritten:
            return None, Failure(
                kind=FailureKind.UNTOUCHED,
                message=f"{unwritten} of {elements} output elements were never written",
            )
        if not (math.isfinite(error) and math.isfinite(max_error)):
            return None, Failure(
                kind=FailureKind.NON_FINITE,
                message="NaN or infinity in the output where the reference is finite",
            )
        if error > bound.error or max_error > bound.max_error:
            return None, Failure(
                kind=FailureKind.WRONG,
                message=(
                    f"relative error {error:.2e} (bound {bound.error:.2e}), largest error "
                    f"{max_error:.2e} (bound {bound.max_error:.2e}) against {self._name}"
                ),
            )
        if unequal and claims_order:
            return None, Failure(
                kind=FailureKind.NOT_REPEATABLE,
                message=f"{unequal} of {elements} output elements differ between two runs",
            )
        return (
            Correctness(
                error=error,
                max_error=max_error,
                tolerance=bound.error,
                repeatable=unequal == 0,
            ),
            None,
        )


def _blocks(problem: Problem) -> Iterator[Block]:
    """Cut the output so that no wide copy of A, B or D exceeds CHUNK_ELEMENTS."""
    m, n, k = problem.m, problem.n, problem.k
    columns = min(n, max(1, CHUNK_ELEMENTS // k))
    rows = min(m, max(1, CHUNK_ELEMENTS // max(k, columns)))
    batches = 1
    if rows == m and columns == n:
        batches = min(problem.batch, max(1, CHUNK_ELEMENTS // max(m * n, m * k, k * n)))
    for first in range(0, problem.batch, batches):
        for row in range(0, m, rows):
            for column in range(0, n, columns):
                yield Block(
                    batches=slice(first, min(first + batches, problem.batch)),
                    rows=slice(row, min(row + rows, m)),
                    columns=slice(column, min(column + columns, n)),
                )


def _hypot(values: list[float]) -> float:
    """Root of the sum of squares; NaN if any is NaN (math.hypot prefers infinity)."""
    return math.nan if any(v != v for v in values) else math.hypot(*values)


def use_precise_fp32() -> None:
    """Make torch's FP32 products really FP32."""
    torch.set_float32_matmul_precision("highest")
