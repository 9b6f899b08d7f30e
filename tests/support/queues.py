"""Jobs in tests of the queue: problems to order, leases, and many calls at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

from gemmsmith.core.problem import Problem
from tests.support.records import PROBLEM
from tests.support.replacing import replace
from tuner.jobs import LeasedJob, Queue

T = TypeVar("T")


def problem(m: int) -> Problem:
    return replace(PROBLEM, m=m)


def leased(queue: Queue, owner: str = "worker-1", ttl_s: float = 60.0) -> LeasedJob:
    taken = queue.lease(owner, ["h200"], ttl_s)
    assert taken is not None
    return taken


def at_once(number: int, work: Callable[[int], T]) -> list[T]:
    """The results of `work(0)`, `work(1)`, …, called by as many threads at the same moment."""
    barrier = Barrier(number)

    def begin(index: int) -> T:
        barrier.wait()
        return work(index)

    with ThreadPoolExecutor(number) as pool:
        return list(pool.map(begin, range(number)))
