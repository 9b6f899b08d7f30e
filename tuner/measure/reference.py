"""The FP32 reference of a problem, and the comparison of an output with it.

The reference is torch's FP32 product (TF32 off) of the very operands the kernels read. It is
computed once per batch of candidates, in blocks whose FP32 copies stay within a bounded scratch,
and kept when it fits in a share of memory, else recomputed per candidate.

Tolerances are on ‖D - R‖ / ‖R‖ (Frobenius). Rounding to bf16 (8 significant bits) alone gives at
most 2⁻⁸ = 3.9e-3 for one element and 1.6e-3 for many, rounding to fp16 (11 bits) an eighth of
it; FP32 accumulation adds about 1e-6. The bounds lie just above the worst of that (5e-3, 1e-3 for
fp16), so a matrix of a single element passes, and below what a mistake costs: one dropped
slice of 64 out of K gives √(64/K), 7.8e-3 even for K = 10⁶. FP8 with fast accumulation keeps
about 13 fraction bits in the tensor core's accumulator and truncates once per 32 terms, an error
that grows with K / 32 · 2⁻¹⁴ · (about 0.6): its bound grows likewise, and meets the error of one
dropped slice of 128 only near K = 32768. Beyond that `max_error` is what catches a lost slice.

The largest single error is bounded too (relative to the largest |R|), because one wrong tile
among many thousands hardly moves the norm. Where D has few elements both norms may be small by
chance (cancellation); they are floored at what the distribution of D predicts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from gemmsmith.answer import Correctness
from gemmsmith.kernel import AnyKernel
from gemmsmith.problem import Element, Problem
from tuner.errors import ReferenceBroken
from tuner.measure.footprint import CHUNK_ELEMENTS
from tuner.measure.operands import POISON, Operands, free_bytes
from tuner.trial import Failure, FailureKind

KEPT_BYTES = 8 * 2**30
"""A reference up to this size (2·10⁹ elements) is kept for the whole batch."""

_TOLERANCE = {Element.BF16: 5e-3, Element.F16: 1e-3}
_MAX_ERROR = {Element.BF16: 1.5e-2, Element.F16: 4e-3}
_FAST_ACCUMULATION_PER_K = 1.25e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """Bounds on the Frobenius error and on the largest error."""

    error: float
    max_error: float


def tolerance(problem: Problem, *, fast_accumulation: bool) -> Tolerance:
    """The bounds an output of this problem has to meet."""
    drift = _FAST_ACCUMULATION_PER_K * problem.k if fast_accumulation else 0.0
    return Tolerance(
        error=_TOLERANCE[problem.operation.d] + drift,
        max_error=_MAX_ERROR[problem.operation.d] + drift,
    )


@dataclass(frozen=True, slots=True)
class _Block:
    """A part of the output: ranges of batches, rows and columns."""

    batches: slice
    rows: slice
    columns: slice

    def of(self, output: torch.Tensor) -> torch.Tensor:
        return output[self.batches, self.rows, self.columns]


class Reference:
    """The FP32 product of an operand set (the first).

    Raises:
        ReferenceBroken: it is not finite.
    """

    def __init__(self, operands: Operands) -> None:
        self.problem = operands.problem
        self._operands = operands
        self._scale = operands.scale_values[0] * operands.scale_values[1]
        self._blocks = tuple(_blocks(self.problem))
        elements = self.problem.m * self.problem.n * self.problem.batch
        keep = elements * 4 <= min(KEPT_BYTES, free_bytes(operands.ordinal) // 4)
        self._kept: list[torch.Tensor] = []
        figures = []
        for block in self._blocks:
            part = self._compute(block)
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
                f"the FP32 reference of {self.problem} is not finite though its inputs are plain "
                "normal samples; suspect this GPU or another process on it, and try again"
            )
        self.norm = max(self.norm, 0.5 * operands.sigma * math.sqrt(elements))
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
            wanted = self._kept[i] if self._kept else self._compute(block)
            difference = torch.sub(wanted, part)
            bits, again = part.view(torch.int16), block.of(second).view(torch.int16)
            figures += [
                torch.linalg.vector_norm(difference),
                torch.linalg.vector_norm(difference, float("inf")),
                (bits == POISON).sum().float(),
                (bits != again).sum().float(),
            ]
        values = torch.stack(figures).tolist()
        error = _hypot(values[0::4]) / self.norm
        max_error = max(values[1::4]) / self.peak if error == error else math.nan
        untouched, unequal = int(sum(values[2::4])), int(sum(values[3::4]))
        bound = tolerance(self.problem, fast_accumulation=kernel.keeps_short_sums)
        elements = self.problem.m * self.problem.n * self.problem.batch
        if untouched:
            return None, Failure(
                kind=FailureKind.UNTOUCHED,
                message=f"{untouched} of {elements} output elements were never written",
            )
        if not (math.isfinite(error) and math.isfinite(max_error)):
            return None, Failure(
                kind=FailureKind.NON_FINITE,
                message="NaN or infinity in the output where the FP32 reference is finite",
            )
        if error > bound.error or max_error > bound.max_error:
            return None, Failure(
                kind=FailureKind.WRONG,
                message=(
                    f"relative error {error:.2e} (bound {bound.error:.2e}), largest error "
                    f"{max_error:.2e} (bound {bound.max_error:.2e}) against FP32"
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

    def _compute(self, block: _Block) -> torch.Tensor:
        operands = self._operands.sets[0]
        a = operands.a[block.batches, block.rows].float()
        b = operands.b[block.batches, :, block.columns].float()
        product = torch.bmm(a, b)
        return product.mul_(self._scale) if self._scale != 1.0 else product


def _blocks(problem: Problem) -> Iterator[_Block]:
    """Cut the output so that no FP32 copy of A, B or D exceeds CHUNK_ELEMENTS."""
    m, n, k = problem.m, problem.n, problem.k
    columns = min(n, max(1, CHUNK_ELEMENTS // k))
    rows = min(m, max(1, CHUNK_ELEMENTS // max(k, columns)))
    batches = 1
    if rows == m and columns == n:
        batches = min(problem.batch, max(1, CHUNK_ELEMENTS // max(m * n, m * k, k * n)))
    for first in range(0, problem.batch, batches):
        for row in range(0, m, rows):
            for column in range(0, n, columns):
                yield _Block(
                    slice(first, min(first + batches, problem.batch)),
                    slice(row, min(row + rows, m)),
                    slice(column, min(column + columns, n)),
                )


def _hypot(values: list[float]) -> float:
    """Root of the sum of squares; NaN if any is NaN (math.hypot prefers infinity)."""
    return math.nan if any(v != v for v in values) else math.hypot(*values)


def use_precise_fp32() -> None:
    """Make torch's FP32 products really FP32."""
    torch.set_float32_matmul_precision("highest")
