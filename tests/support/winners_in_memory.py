"""A source of winners for lookups without a store."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gemmsmith.core.neighbours import NEIGHBOURS, Neighbourhood
from gemmsmith.core.problem import Problem
from service.lookup.find import REACH
from tuner.store.served import Won
from tuner.trial import Winner


class WinnersInMemory:
    """A `service.lookup.find.WinnerSource`."""

    def __init__(
        self,
        winners: Iterable[Winner],
        pack_for: Callable[[str], str | None] = lambda _: None,
    ) -> None:
        self.pack_for = pack_for
        self._exact = {(winner.problem, winner.device.slug): winner for winner in winners}
        self._around: dict[str, Neighbourhood[Won]] = {}
        for order, ((problem, device), winner) in enumerate(self._exact.items()):
            around = self._around.setdefault(device, Neighbourhood())
            around.put(problem, order, Won(winner.use, winner.candidate))

    def winners_of(self, problems: Iterable[Problem], device: str) -> list[Winner]:
        """The current winners of exactly these problems."""
        keys = ((problem, device) for problem in problems)
        return [self._exact[key] for key in keys if key in self._exact]

    def near(self, problem: Problem, device: str) -> list[tuple[Problem, Won]]:
        """Problems of the same kind with what won on them, nearest first."""
        around = self._around.get(device)
        return [] if around is None else around.nearest(problem, NEIGHBOURS, REACH)
