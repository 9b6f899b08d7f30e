"""A source of winners for lookups that needs no store."""

from __future__ import annotations

from collections.abc import Iterable

from gemmsmith.neighbours import Neighbourhood
from gemmsmith.problem import Problem
from tuner.trial import Winner


class WinnersInMemory:
    """A `service.lookup.find.WinnerSource`."""

    def __init__(self, winners: Iterable[Winner]) -> None:
        self._exact = {(winner.problem, winner.device.slug): winner for winner in winners}
        self._around: dict[str, Neighbourhood[Winner]] = {}
        for (problem, device), winner in self._exact.items():
            self._around.setdefault(device, Neighbourhood()).add(problem, winner)

    def winner(self, problem: Problem, device_slug: str) -> Winner | None:
        """The current winner for exactly this problem."""
        return self._exact.get((problem, device_slug))

    def near_winners(
        self, problem: Problem, device_slug: str, limit: int, reach: float
    ) -> list[Winner]:
        """Current winners of the same operation, batch and device, nearest first."""
        around = self._around.get(device_slug)
        return [] if around is None else around.nearest(problem, limit, reach)
