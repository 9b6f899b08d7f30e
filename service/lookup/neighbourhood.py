"""What a prediction has to know of the store: that nothing near was measured, and a kernel's pack.

One look at the store's marks tells whether what was read before is still so; else three queries
would be made for it. No answer is older than the store. Every change of what is served takes a new
sequence, and a problem that has a winner keeps having one: what is newer is read as it comes.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from functools import cached_property

from gemmsmith.problem import Problem
from service.lookup.find import REACH
from tuner.store import Store
from tuner.trial import Winner

MOST = 5_000
"""Problems up to which there is a chart (80 ms to draw it); among more, the queries decide."""

_Kind = tuple[str, str, str, int]


class Chart:
    """The problems of one store that have winners, on all device models. Threads share it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._drawing = threading.Lock()
        self._sequence = 0
        self._packs: tuple[int, int, int] | None = None
        self._pack_of: dict[str, str | None] = {}
        self._is_crowded = False
        self._known: set[tuple[str, Problem]] = set()
        self._extents: dict[_Kind, list[tuple[float, float, float]]] = {}

    def has_near(self, problem: Problem, device: str) -> bool:
        """Whether a problem of its kind within reach has a winner, as far as is drawn."""
        here = problem.log_extents
        there = self._extents.get(_kind(problem, device), ())
        return self._is_crowded or any(math.dist(here, other) <= REACH for other in there)

    def pack_for(self, kernel: str) -> str | None:
        """Hash of the newest pack that held the kernel when the chart caught up, or a newer one.

        Raises:
            StoreError: it is not known and cannot be read.
        """
        known = self._pack_of
        if kernel not in known:
            known[kernel] = self._store.pack_for(kernel)
        return known[kernel]

    def catch_up(self) -> None:
        """Draw what the store has by now.

        Raises:
            StoreError: it cannot be read; the chart stays as it was.
        """
        if self._store.changes.served() == (self._sequence, self._packs):
            return
        with self._drawing:
            sequence, packs = self._store.changes.served()
            if packs != self._packs:
                self._pack_of = {}  # another one: who is still reading keeps to the old
                self._packs = packs
            if sequence < self._sequence:
                # Another database has taken the place of ours.
                self._sequence, self._known, self._extents = 0, set(), {}
            if sequence != self._sequence:
                self._draw(self._store.changes.winners_since(self._sequence, MOST + 1))
                self._sequence = sequence

    def _draw(self, newer: Sequence[tuple[str, Problem]]) -> None:
        for device, problem in newer:
            if (device, problem) not in self._known:
                self._known.add((device, problem))
                alike = self._extents.setdefault(_kind(problem, device), [])
                alike.append(problem.log_extents)
        if len(self._known) > MOST or len(newer) > MOST:
            self._is_crowded = True
            self._known, self._extents = set(), {}


class Charted:
    """A store's winners for one call, read only where the chart has any. A `WinnerSource`."""

    def __init__(self, store: Store, chart: Chart) -> None:
        self._store = store
        self._chart = chart

    def winner(self, problem: Problem, device_slug: str) -> Winner | None:
        """The current winner for exactly this problem."""
        if self._is_alone(problem, device_slug):
            return None
        return self._store.winner(problem, device_slug)

    def near_winners(
        self, problem: Problem, device_slug: str, limit: int, reach: float
    ) -> Sequence[Winner]:
        """Current winners of the same types, layout, batch and device, nearest first."""
        if self._is_alone(problem, device_slug):
            return []
        return self._store.near_winners(problem, device_slug, limit, reach)

    def pack_for(self, kernel: str) -> str | None:
        """Hash of the newest pack that holds the kernel."""
        if "_caught_up" in self.__dict__:
            return self._chart.pack_for(kernel)
        return self._store.pack_for(kernel)

    def _is_alone(self, problem: Problem, device: str) -> bool:
        if self._chart.has_near(problem, device):
            return False
        return not (self._caught_up and self._chart.has_near(problem, device))

    @cached_property
    def _caught_up(self) -> bool:
        self._chart.catch_up()
        return True


def _kind(problem: Problem, device: str) -> _Kind:
    return (device, problem.dtype, problem.layout, problem.batch)
