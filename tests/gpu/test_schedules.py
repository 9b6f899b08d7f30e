"""Every schedule, one kernel of each: numbers, launches in a row, and products that feed another.

Kernels are launched with programmatic dependent launch: the next one starts while the last one
still runs. What each may then not touch too early is what the launches in a row would show. They
run in a process of their own (support/worker.py): a hang or a crash costs its own test.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest

from gemmsmith.core.kernel import Backend, Kernel, TileScheduler
from gemmsmith.core.launch import Decomposition, Launch
from gemmsmith.core.problem import DType, Problem
from tests.gpu import selection
from tests.gpu.conftest import Packs
from tests.gpu.support.jobs import Job
from tests.gpu.support.worker import Worker

RAGGED = ((1, 8, 63), (200, 136, 512), (257, 391, 1031), (130, 72, 2050))
Record = Callable[[str, object], None]

KINDS = [
    pytest.param(kind, dtype, id=f"{kind}-{dtype}")
    for dtype in selection.KIND_DTYPES
    for kind in selection.KINDS
]
BF16_KINDS = [pytest.param(kind, id=kind) for kind in selection.KINDS]


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as opened:
        yield opened


def _kernel(kind: str, dtype: DType) -> Kernel:
    kernel = selection.of_kind(kind, dtype)
    if kernel is None:
        pytest.skip(f"the space has no {kind} kernel for {dtype}")
    return kernel


def _job(
    check: str, kernel: Kernel, launches: tuple[Launch, ...], problem: Problem, packs: Packs
) -> Job:
    pack = packs.contender(kernel).pack
    return Job(check=check, kernel=kernel, launches=launches, pack=str(pack), problem=problem)


def _alternating(kernel: Kernel) -> tuple[Launch, ...]:
    """Launches to take in turn, which lay out one workspace differently."""
    if kernel.scheduler is TileScheduler.SPLIT_K:
        counts: tuple[int, ...] = (2, 3, 16)
    elif kernel.backend is Backend.CUTE:
        counts = (1, 4, 7)
    else:
        return selection.splits_of(kernel)
    split = Decomposition.SPLIT_K
    return tuple(Launch(decomposition=split, splits=n) if n > 1 else Launch() for n in counts)


def _divisor(kernel: Kernel, launches: tuple[Launch, ...]) -> int:
    """Splits for which K must be long enough; for equal slices all of them divide it."""
    splits = [launch.splits for launch in launches]
    return max(splits) if kernel.backend is Backend.CUTE else math.lcm(*splits)


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_numbers_of_ragged_problems(
    kind: str, dtype: DType, packs: Packs, worker: Worker, record_property: Record
) -> None:
    kernel = _kernel(kind, dtype)
    for m, n, k in RAGGED:
        for launch in selection.splits_of(kernel):
            # Slices of a few elements are no problem that anyone would split.
            enough = max(k, 128 * launch.splits) if launch.splits > 1 else k
            problem = selection.suited(kernel, m, n, enough, splits=launch.splits)
            verdict = worker.run(_job("numerics", kernel, (launch,), problem, packs))
            assert verdict.failure is None, f"{kernel.name} on {problem}: {verdict.failure}"
            record_property(f"{problem} {launch.key}", verdict.figures)


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_two_hundred_launches_in_a_row(
    kind: str, dtype: DType, packs: Packs, worker: Worker, record_property: Record
) -> None:
    kernel = _kernel(kind, dtype)
    launches = _alternating(kernel)
    for m, n, k in ((200, 136, 1537), (64, 520, 4601)):
        problem = selection.suited(kernel, m, n, k, splits=_divisor(kernel, launches))
        verdict = worker.run(_job("in_a_row", kernel, launches, problem, packs))
        assert verdict.failure is None, f"{kernel.name} on {problem}: {verdict.failure}"
        record_property(str(problem), verdict.figures)


@pytest.mark.parametrize("kind", BF16_KINDS)
def test_products_that_feed_the_next(kind: str, packs: Packs, worker: Worker) -> None:
    kernel = _kernel(kind, DType.BF16)
    launches = _alternating(kernel)
    for m, side in ((40, 331), (264, 1161)):
        wide = selection.suited(kernel, m, side, side, splits=_divisor(kernel, launches))
        side = max(wide.n, wide.k)
        problem = selection.suited(kernel, m, side, side, splits=_divisor(kernel, launches))
        assert problem.n == problem.k
        verdict = worker.run(_job("dependent", kernel, launches, problem, packs))
        assert verdict.failure is None, f"{kernel.name} on {problem}: {verdict.failure}"
