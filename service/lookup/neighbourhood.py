"""The problems that have a winner, in memory, so that neighbours cost no query of their own.

One look at the store's marks shows whether what was read before still holds. No answer is older
than the store: every change of what is served takes a new sequence, a problem that has a winner
keeps having one, and what is newer is read as it comes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import Self

from gemmsmith.core.neighbours import NEIGHBOURS, Neighbourhood
from gemmsmith.core.problem import Problem
from service.lookup.find import REACH
from tuner.errors import StoreError
from tuner.store import Store
from tuner.store.changes import newest
from tuner.store.served import Won
from tuner.trial import Winner


class Chart:
    """The problems of one store that have winners, on all device models. Threads share it.

    While its context is entered, it is drawn in the background: 200,000 winners take 1 s.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._sequence = 0
        self._packs: tuple[int, int, int] | None = None
        self._pack_of: dict[str, str] = {}
        self._around: dict[str, Neighbourhood[Won]] = {}
        self._ahead = threading.Thread(target=self._draw_ahead, name="chart", daemon=True)

    def __enter__(self) -> Self:
        self._ahead.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ahead.join()

    def _draw_ahead(self) -> None:
        with suppress(StoreError):  # the first lookup that needs the chart raises the same
            self.catch_up()

    def near(self, problem: Problem, device: str) -> list[tuple[Problem, Won]]:
        """The problem's neighbours and what won on them, nearest first, as far as is drawn."""
        with self._lock:
            around = self._around.get(device)
            return [] if around is None else around.nearest(problem, NEIGHBOURS, REACH)

    def pack_for(self, kernel: str) -> str | None:
        """Hash of the newest pack that held the kernel when the chart caught up."""
        return self._pack_of.get(kernel)

    def catch_up(self) -> None:
        """Draw what the store has by now.

        Raises:
            StoreError: it cannot be read; the chart stays as it was.
        """
        if self._store.changes.served() == (self._sequence, self._packs):
            return
        with self._lock:
            sequence, packs = self._store.changes.served()
            if packs != self._packs:
                self._pack_of = newest(self._store.changes.packed())
                self._packs = packs
            if sequence < self._sequence:  # another database
                self._around, self._sequence = {}, 0
            if sequence > self._sequence:
                for device, order, problem, won in self._store.served.places(self._sequence):
                    self._around.setdefault(device, Neighbourhood()).put(problem, order, won)
                self._sequence = sequence


class Charted:
    """A store's winners for one request, with neighbours from the chart. A `WinnerSource`."""

    def __init__(self, store: Store, chart: Chart) -> None:
        self._store = store
        self._chart = chart
        self._is_new = False

    def winners_of(self, problems: Iterable[Problem], device: str) -> list[Winner]:
        """The current winners of the problems."""
        return self._store.winners_of(problems, device)

    def near(self, problem: Problem, device: str) -> list[tuple[Problem, Won]]:
        """The problem's neighbours and what won on them, nearest first."""
        if not self._is_new:
            self._chart.catch_up()
            self._is_new = True
        return self._chart.near(problem, device)

    def pack_for(self, kernel: str) -> str | None:
        """Hash of the newest pack that holds the kernel."""
        return (self._chart if self._is_new else self._store).pack_for(kernel)
