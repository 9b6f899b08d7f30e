"""A source of winners for lookups without a store."""

from __future__ import annotations

from collections.abc import Iterable

from gemmsmith.core.config import MAX_DISTANCE
from gemmsmith.core.neighbours import NEIGHBOURS, Neighbourhood
from gemmsmith.core.problem import Problem
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

    def won_near(self, problem: Problem, device_slug: str) -> list[tuple[Problem, str]]:
        """Neighbouring problems, and the kernels that won on them."""
        near = self.near_winners(problem, device_slug, NEIGHBOURS, MAX_DISTANCE)
        return [(won.problem, won.runs.kernel.name) for won in near if won.runs is not None]
