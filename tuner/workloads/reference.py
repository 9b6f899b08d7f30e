"""The reference of a problem in higher precision, and the comparison of an output with it.

The reference is torch's product of the very operands the kernels read, in FP32 (TF32 off) where D
is rounded to 16 bits, else in FP64. It is computed once per batch of candidates, in blocks whose
wide copies stay within a bounded scratch, and kept when it fits in a share of memory, else
recomputed per candidate. Where the same extents may be divided in several ways (groups), every one
of those cases is judged.

Tolerances are on ‖D - R‖ / ‖R‖ (Frobenius); each workload says which, and why. The largest single
error is bounded too (relative to the largest |R|), because one wrong tile among many thousands
hardly moves the norm. Where D has few elements both norms may be small by chance (cancellation);
they are floored at what the distribution of D predicts.
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
"""A reference up to this size (2·10⁹ elements in FP32) is kept for the whole batch."""


def tolerance(problem: Problem, *, fast_accumulation: bool) -> Tolerance:
    """The bounds an output of this problem has to meet."""
    workload = workload_of(problem.operation)
    return workload.tolerance(problem, fast_accumulation=fast_accumulation)


class Reference:
    """What one launch of each of the operands' cases leaves in D, in higher precision.

    Raises:
        ReferenceBroken: it is not finite.
    """

    def __init__(self, operands: Operands) -> None:
        self._problem = operands.problem
        precision = operands.workload.precision(operands.problem)
        size = len(operands.cases) * operands.check.numel() * precision.itemsize
        keep = size <= min(KEPT_BYTES, free_bytes(operands.ordinal) // 4)
        self._wanted = [_Wanted(operands, case, precision, keep=keep) for case in operands.cases]

    def check(
        self,
        kernel: AnyKernel,
        *,
        claims_order: bool,
        launch: Callable[[int], None] = lambda _: None,
    ) -> tuple[Correctness, None] | tuple[None, Failure]:
        """Judge each case's output, and `operands.check` as the same launch's second run.

        `launch(i)` enqueues both runs of the i-th case, unless they are there already.
        `claims_order`: the schedule sums in a fixed order, so other bits are a failure. One
        synchronization a case, whatever the size; one more where a largest value is an output.
        """
        bound = tolerance(self._problem, fast_accumulation=kernel.keeps_short_sums)
        found: list[Correctness] = []
        for i, wanted in enumerate(self._wanted):
            launch(i)
            judged = wanted.judge(bound, claims_order=claims_order)
            if isinstance(judged, Failure):
                return None, judged
            found.append(judged)
        return (
            Correctness(
                error=max(each.error for each in found),
                max_error=max(each.max_error for each in found),
                tolerance=bound.error,
                repeatable=all(each.repeatable for each in found),
            ),
            None,
        )


class _Wanted:
    """The reference of one case, kept or made anew for every output."""

    def __init__(
        self, operands: Operands, case: Case, precision: torch.dtype, *, keep: bool
    ) -> None:
        problem = operands.problem
        self._operands, self._case = operands, case
        self._name = f"FP{8 * precision.itemsize}"
        self._blocks = tuple(_blocks(problem, case.written))
        self._each_alone = len(case.sigmas) > 1
        self._elements = case.written * problem.columns * problem.matrices[2]
        self._kept: list[torch.Tensor] = []
        figures = []
        for block in self._blocks:
            part = operands.wanted(case.operands, block)
            figures.append(self._sizes(part))
            if keep:
                self._kept.append(part)
        norms, peaks = self._read(figures, 2)
        self._norms, self._peaks = list(map(_hypot, norms)), list(map(_largest, peaks))
        if not all(map(math.isfinite, (*self._norms, *self._peaks))):
            raise ReferenceBroken(
                f"the {self._name} reference of {problem} is not finite though its inputs are "
                "plain normal samples; suspect this GPU or another process on it, and try again"
            )
        floor = tolerance(problem, fast_accumulation=False).floor
        largest = self._peaks[0]
        root = math.sqrt(max(1, self._elements) / len(case.sigmas))
        for i, sigma in enumerate(case.sigmas):
            self._norms[i] = max(self._norms[i], floor * sigma * root)
            self._peaks[i] = max(self._peaks[i], sigma)
        # D's factor is a power of two, so nothing is lost by dividing by it.
        scale = 1.0 if case.operands.scale_d is None else float(case.operands.scale_d)
        self._amax, self._amax_floor = largest / scale, self._peaks[0] / scale

    def judge(self, bound: Tolerance, *, claims_order: bool) -> Correctness | Failure:
        """Compare the case's output with the reference, and with `operands.check`."""
        first, second = self._case.operands.d, self._operands.check
        figures = []
        for i, block in enumerate(self._blocks):
            part = block.of(first)
            wanted = self._kept[i] if self._kept else self._made(block)
            counts = [poisoned(part), bits(part) != bits(block.of(second))]
            sums = [each.sum(dim=self._dims).view(1, -1).to(wanted.dtype) for each in counts]
            if part.dtype.itemsize == 1:  # torch does not mix FP8 with other types
                part = part.to(wanted.dtype)
            figures.append(torch.cat([self._sizes(torch.sub(wanted, part)), *sums]))
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
            if not off <= bound.amax * self._amax_floor:
                return Failure(
                    kind=FailureKind.WRONG,
                    message=(
                        f"the largest value is {float(amax):.6g}, not {self._amax:.6g} (bound "
                        f"{bound.amax:.2e}) against {self._name}{where}"
                    ),
                )
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

    def _made(self, block: Block) -> torch.Tensor:
        return self._operands.wanted(self._case.operands, block)

    @property
    def _dims(self) -> tuple[int, ...]:
        """What one figure of a block is of: each of its matrices, or all of it."""
        return (1, 2) if self._each_alone else (0, 1, 2)

    def _sizes(self, part: torch.Tensor) -> torch.Tensor:
        """Frobenius norm and largest element: [2, 1], or [2, matrices of the block]."""
        return torch.stack(
            [
                torch.linalg.vector_norm(part, order, dim=self._dims).view(-1)
                for order in (2, float("inf"))
            ]
        )

    def _read(self, figures: Sequence[torch.Tensor], count: int) -> list[list[list[float]]]:
        """Wait for `count` figures of every block: `[figure][matrix or 0]`, one value a block."""
        places: list[list[list[float]]] = [[[] for _ in self._case.sigmas] for _ in range(count)]
        if not figures:  # nothing is written
            return places
        columns = iter(torch.cat(tuple(figures), 1).T.tolist())
        for block, found in zip(self._blocks, figures, strict=True):
            first = block.batches.start if self._each_alone else 0
            for place in range(first, first + found.shape[1]):
                for figure, value in zip(places, next(columns), strict=True):
                    figure[place].append(value)
        return places


def _blocks(problem: Problem, m: int) -> Iterator[Block]:
    """Cut D's first `m` rows so that no wide copy of A, B or D exceeds CHUNK_ELEMENTS."""
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
    """Root of the sum of squares; NaN if any is NaN (math.hypot prefers infinity)."""
    return math.nan if any(v != v for v in values) else math.hypot(*values)


def _largest(values: list[float]) -> float:
    """The largest; NaN if any is NaN, 0 of none."""
    return math.nan if any(v != v for v in values) else max(values, default=0.0)


def use_precise_fp32() -> None:
    """Make torch's FP32 products really FP32."""
    torch.set_float32_matmul_precision("highest")
