"""The reference of a problem in higher precision, and the comparison of an output with it.

The reference is torch's product of the operands that the kernels read: in FP32 (without TF32) if D
is rounded to 16 bits, else in FP64. It is computed once per batch of candidates, in blocks that
bound the scratch memory, and kept if it fits in a share of the memory; else it is recomputed for
every candidate. If the same extents can be divided in several ways (groups), every such case is
verified.

Tolerances bound ‖D - R‖ / ‖R‖ (Frobenius); a workload states and derives them. The largest single
error, relative to the largest |R|, is bounded too, because one wrong tile among thousands hardly
changes the norm. If D has few elements, both norms can be small by chance (cancellation), so they
count as at least what the distribution of D predicts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from gemmsmith.answers.answer import Correctness
from gemmsmith.core.kernel import AnyKernel
from gemmsmith.core.problem import Problem
from tuner.errors import ReferenceBroken
from tuner.trial import Failure, FailureKind
from tuner.workloads.footprint import CHUNK_ELEMENTS
from tuner.workloads.operands import Operands, bits, free_bytes, poisoned, untouched
from tuner.workloads.registry import workload_of
from tuner.workloads.workload import Block, Case, Tolerance

KEPT_BYTES = 8 * 2**30
"""Largest reference that is kept for a batch: 2·10⁹ elements in FP32."""


def tolerance(problem: Problem, *, fast_accumulation: bool) -> Tolerance:
    workload = workload_of(problem.operation)
    return workload.tolerance(problem, fast_accumulation=fast_accumulation)


class Reference:
    """The expected outputs of all of the operands' cases, in higher precision.

    Raises:
        ReferenceBroken: a reference is not finite.
    """

    def __init__(self, operands: Operands) -> None:
        self._problem = operands.problem
        precision = operands.workload.precision(operands.problem)
        size = len(operands.cases) * operands.check.numel() * precision.itemsize
        keep = size <= min(KEPT_BYTES, free_bytes(operands.ordinal) // 4)
        self._cases = [
            _CaseReference(operands, case, precision, keep=keep) for case in operands.cases
        ]

    def check(
        self,
        kernel: AnyKernel,
        *,
        claims_order: bool,
        launch: Callable[[int], None] = lambda _: None,
    ) -> tuple[Correctness, None] | tuple[None, Failure]:
        """Compare the cases' outputs with their references, and with a second run.

        `launch(i)` enqueues both runs of the i-th case: into its D, and into `operands.check`. By
        default the outputs are there already. With `claims_order`, the schedule sums in a fixed
        order, so different bits in the second run are a failure. A case takes one synchronization
        of any size, and one or two more if there is an output beside D.
        """
        bound = tolerance(self._problem, fast_accumulation=kernel.keeps_short_sums)
        correct: list[Correctness] = []
        for i, case in enumerate(self._cases):
            launch(i)
            verdict = case.judge(bound, claims_order=claims_order)
            if isinstance(verdict, Failure):
                return None, verdict
            correct.append(verdict)
        return (
            Correctness(
                error=max(case.error for case in correct),
                max_error=max(case.max_error for case in correct),
                tolerance=bound.error,
                repeatable=all(case.repeatable for case in correct),
            ),
            None,
        )


class _CaseReference:
    """The reference of one case, kept or recomputed for every output."""

    def __init__(
        self, operands: Operands, case: Case, precision: torch.dtype, *, keep: bool
    ) -> None:
        problem = operands.problem
        self._operands, self._case = operands, case
        self._name = f"FP{8 * precision.itemsize}"
        self._blocks = tuple(_blocks(problem, case.written))
        self._by_matrix = len(case.sigmas) > 1
        self._elements = case.written * problem.columns * problem.matrices[2]
        self._kept: list[torch.Tensor] = []
        figures = []
        for block in self._blocks:
            part = operands.expected(case.operands, block)
            figures.append(self._sizes(part))
            if keep:
                self._kept.append(part)
        norms, peaks = self._read(figures, 2)
        self._norms, self._peaks = list(map(_hypot, norms)), list(map(_largest, peaks))
        if not all(map(math.isfinite, (*self._norms, *self._peaks))):
            raise ReferenceBroken(
                f"the {self._name} reference of {problem} is not finite although its inputs are "
                "normal samples; suspect this GPU or another process on it, and try again"
            )
        # A few elements can be small by chance: errors are then relative to the expected size.
        floor = tolerance(problem, fast_accumulation=False).floor
        largest = self._peaks[0]
        root = math.sqrt(max(1, self._elements) / len(case.sigmas))
        for i, sigma in enumerate(case.sigmas):
            self._norms[i] = max(self._norms[i], floor * sigma * root)
            self._peaks[i] = max(self._peaks[i], sigma)
        # D's factor is a power of two, so the division is exact.
        scale = 1.0 if case.operands.scale_d is None else float(case.operands.scale_d)
        self._amax, self._amax_floor = largest / scale, self._peaks[0] / scale

    def judge(self, bound: Tolerance, *, claims_order: bool) -> Correctness | Failure:
        """Compare the case's output with the reference, and with `operands.check`."""
        first, second = self._case.operands.d, self._operands.check
        figures = []
        for i, block in enumerate(self._blocks):
            part = block.of(first)
            expected = (
                self._kept[i] if self._kept else self._operands.expected(self._case.operands, block)
            )
            # Bits, not values: a NaN differs from itself.
            masks = [poisoned(part), bits(part) != bits(block.of(second))]
            counts = [mask.sum(dim=self._dims).view(1, -1).to(expected.dtype) for mask in masks]
            if part.dtype.itemsize == 1:  # torch does not mix FP8 with other types
                part = part.to(expected.dtype)
            figures.append(torch.cat([self._sizes(torch.sub(expected, part)), *counts]))
        differences, largest, poison, other = self._read(figures, 4)
        error = _largest([_hypot(d) / n for d, n in zip(differences, self._norms, strict=True)])
        max_error = _largest([_largest(d) / p for d, p in zip(largest, self._peaks, strict=True)])
        unwritten, unequal = int(sum(map(sum, poison))), int(sum(map(sum, other)))
        beyond = first[:, self._case.written :]
        overwritten = beyond.numel() - int(untouched(beyond)) if beyond.numel() else 0
        where = f" ({self._case.name} groups)" if self._case.name else ""
        if unwritten:
            return Failure(
                kind=FailureKind.UNTOUCHED,
                message=f"{unwritten} of {self._elements} output elements were never written"
                + where,
            )
        if not (math.isfinite(error) and math.isfinite(max_error)):
            return Failure(
                kind=FailureKind.NON_FINITE,
                message=f"NaN or infinity in the output where the reference is finite{where}",
            )
        if error > bound.error or max_error > bound.max_error:
            return Failure(
                kind=FailureKind.WRONG,
                message=(
                    f"relative error {error:.2e} (bound {bound.error:.2e}), largest error "
                    f"{max_error:.2e} (bound {bound.max_error:.2e}) against {self._name}{where}"
                ),
            )
        if (amax := self._case.operands.amax) is not None:
            off = abs(float(amax) - self._amax)
            if not off <= bound.amax * self._amax_floor:  # also true of NaN
                return Failure(
                    kind=FailureKind.WRONG,
                    message=(
                        f"the largest value is {float(amax):.6g}, not {self._amax:.6g} (bound "
                        f"{bound.amax:.2e}) against {self._name}{where}"
                    ),
                )
        beside = self._case.beside
        if beside is not None and (fault := beside(bound.error)) is not None:
            return Failure(kind=FailureKind.WRONG, message=f"{fault}{where}")
        if overwritten:
            return Failure(
                kind=FailureKind.WRONG,
                message=f"{overwritten} elements after the last group's rows were written{where}",
            )
        if unequal and claims_order:
            return Failure(
                kind=FailureKind.NOT_REPEATABLE,
                message=f"{unequal} of {self._elements} output elements differ between two runs"
                + where,
            )
        return Correctness(
            error=error, max_error=max_error, tolerance=bound.error, repeatable=unequal == 0
        )

    @property
    def _dims(self) -> tuple[int, ...]:
        return (1, 2) if self._by_matrix else (0, 1, 2)

    def _sizes(self, part: torch.Tensor) -> torch.Tensor:
        """Frobenius norm and largest absolute value: [2, 1], or [2, matrices of the block]."""
        return torch.stack(
            [
                torch.linalg.vector_norm(part, order, dim=self._dims).view(-1)
                for order in (2, float("inf"))
            ]
        )

    def _read(self, figures: Sequence[torch.Tensor], count: int) -> list[list[list[float]]]:
        """Wait for `count` figures of every block.

        Returns `values[figure][matrix]`, with one value per block that the matrix lies in; `matrix`
        is 0 if all matrices are judged together.
        """
        values: list[list[list[float]]] = [[[] for _ in self._case.sigmas] for _ in range(count)]
        if not figures:  # the case writes no rows
            return values
        # One transfer for all blocks: a synchronization costs more than the copy.
        columns = iter(torch.cat(tuple(figures), 1).T.tolist())
        for block, of_block in zip(self._blocks, figures, strict=True):
            first = block.batches.start if self._by_matrix else 0
            for matrix in range(first, first + of_block.shape[1]):
                for figure, value in zip(values, next(columns), strict=True):
                    figure[matrix].append(value)
        return values


def _blocks(problem: Problem, m: int) -> Iterator[Block]:
    """Divide D's first `m` rows so that no wide copy of A, B or D exceeds CHUNK_ELEMENTS."""
    if m == 0:
        return
    n, k, matrices = problem.columns, problem.k, problem.matrices[2]
    columns = min(n, max(1, CHUNK_ELEMENTS // k))
    rows = min(m, max(1, CHUNK_ELEMENTS // max(k, columns)))
    batches = 1
    if rows == m and columns == n:
        batches = min(matrices, max(1, CHUNK_ELEMENTS // max(m * n, m * k, k * n)))
    for first in range(0, matrices, batches):
        for row in range(0, m, rows):
            for column in range(0, n, columns):
                yield Block(
                    batches=slice(first, min(first + batches, matrices)),
                    rows=slice(row, min(row + rows, m)),
                    columns=slice(column, min(column + columns, n)),
                )


def _hypot(values: list[float]) -> float:
    # math.hypot prefers infinity to NaN, which must not be lost.
    return math.nan if any(v != v for v in values) else math.hypot(*values)


def _largest(values: list[float]) -> float:
    # `max` drops NaN, depending on the order.
    return math.nan if any(v != v for v in values) else max(values, default=0.0)


def use_precise_fp32() -> None:
    torch.set_float32_matmul_precision("highest")
