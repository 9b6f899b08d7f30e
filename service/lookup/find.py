"""From a problem to an answer: the exact winner, the nearest legal neighbour's, or a prediction.

Pure over its source: nothing is measured, compiled or written. A neighbour has the problem's
operation, batch and device. Its figures stay those of the problem that was measured, and the answer
says which that is; nothing is extrapolated. Its kernel is to be run only where such kernels were
seen to win (`gemmsmith.core.neighbours`); else the answer is to run cuBLAS. Where no neighbour is
near enough, the answer is the cost model's proposal without any measured figure, and to run cuBLAS
until the problem is tuned: only what was measured may replace that. An operation that demands an
order of sums is answered by measured kernels of that order alone, or not at all.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import fields
from typing import Protocol, Self

from gemmsmith.answers.answer import Answer
from gemmsmith.core.candidate import Candidate
from gemmsmith.core.config import MAX_DISTANCE, Match, Use
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.neighbours import NEIGHBOURS, Neighbourhood, answering
from gemmsmith.core.problem import Problem
from service import documents
from service.lookup.abilities import UNMEASURED, without_candidate
from tuner.backends import is_legal
from tuner.errors import StoreError
from tuner.search.predict import Prediction, predict
from tuner.store import Store
from tuner.store.changes import newest
from tuner.store.served import Won
from tuner.trial import UNREADABLE, Winner

REACH = MAX_DISTANCE + 0.01
"""What is read: distances are rounded in two ways, and `answering` decides."""

EXACT = frozenset({Match.EXACT})
MEASURED = frozenset({Match.EXACT, Match.NEAREST})
ANY = frozenset(Match)
"""What may answer a question."""

"""Predicts where no winner answers."""

_SAME_IN_BOTH = {field.name for field in fields(Answer)} & {field.name for field in fields(Winner)}
"""What an answer says in the winner's words."""

PackOf = Callable[[str], str | None]
"""The pack that holds a kernel, by the kernel's name."""


class WinnerSource(Protocol):
    """What a lookup reads: the store, or the store with a chart of it."""

    def winners_of(self, problems: Iterable[Problem], device: str) -> list[Winner]:
        """The current winners of exactly these problems, in no order."""
        ...

    def near(self, problem: Problem, device: str) -> Sequence[tuple[Problem, Won]]:
        """Problems of the same kind with what won on them, nearest first."""
        ...

    def pack_for(self, kernel: str) -> str | None:
        """Hash of the newest pack that holds the kernel."""
        ...


def find(
    source: WinnerSource,
    problem: Problem,
    device: DeviceModel,
    *,
    accepted: Collection[Match],
) -> Answer | None:
    """As `find_many`, for one problem; None without an answer."""
    answers = find_many(source, [problem], device, accepted=accepted)
    return answers.get(problem)


def find_many(
    source: WinnerSource,
    problems: Sequence[Problem],
    device: DeviceModel,
    *,
    accepted: Collection[Match],
) -> dict[Problem, Answer]:
    """The best answer of the `accepted` kinds for each problem on the device.

    A problem without a winner, a neighbour's winner or a legal kernel, as far as these are
    accepted, has no answer.
    """
    pack_of = functools.cache(source.pack_for)
    answers = {
        problem: as_served(winner, pack_of)
        for problem, winner in _winners(source, problems, device).items()
    }
    if Match.NEAREST in accepted and len(answers) < len(problems):
        others = [problem for problem in problems if problem not in answers]
        answers |= _of_neighbours(source, others, device, pack_of)
    if Match.PREDICTED in accepted:
        for problem in problems:
            if problem in answers or problem.operation.summation is not None:
                continue  # to run cuBLAS until then would give other bits
            if prediction := predict(problem, device):
                answers[problem] = _predicted(problem, device, prediction, pack_of)
    return answers


def _of_neighbours(
    source: WinnerSource, problems: Iterable[Problem], device: DeviceModel, pack_of: PackOf
) -> dict[Problem, Answer]:
    """The answers of the neighbours' winners, all of which are read at once.

    A neighbour whose answer is cuBLAS answers too: cuBLAS takes every problem. Its candidate comes
    along only if it is legal for the problem. Where an order of sums is demanded, no answer is
    cuBLAS.
    """
    chosen = {}
    for problem in problems:
        near = source.near(problem, device.slug)
        if answer := answering(problem, near, lambda won: _is_legal(won.candidate, problem)):  # noqa: B023
            chosen[problem] = answer
    if not chosen:
        return {}
    winners = _winners(source, {there for there, _, _ in chosen.values()}, device)
    answers = {}
    for problem, (there, won, use) in chosen.items():
        winner = winners.get(there)
        if winner is None:
            continue
        has_order = problem.operation.summation is not None
        if winner.candidate != won.candidate and not has_order:  # promoted a moment ago
            use = Use.CUBLAS
        if not _is_legal(winner.candidate, problem):
            if has_order:
                continue
            winner = without_candidate(winner)
        answers[problem] = _answer(problem, winner, Match.NEAREST, pack_of, use)
    return answers


def _winners(
    source: WinnerSource, problems: Iterable[Problem], device: DeviceModel
) -> dict[Problem, Winner]:
    """The problems' own winners, as far as they can be read."""
    winners = {}
    for winner in source.winners_of(problems, device.slug):
        if winner.digest != UNREADABLE:
            winners[winner.problem] = winner
    return winners


def _is_legal(candidate: Candidate | None, problem: Problem) -> bool:
    return candidate is not None and is_legal(candidate, problem)


def as_served(winner: Winner, pack_of: PackOf) -> Answer:
    """What is answered to the winner's own problem while that winner is served."""
    return _answer(winner.problem, winner, Match.EXACT, pack_of, winner.use)


def _answer(problem: Problem, winner: Winner, match: Match, pack_of: PackOf, use: Use) -> Answer:
    pack = winner.pack
    if pack is None and winner.candidate is not None:
        # A kernel compiled after the promotion has a pack that the winner does not know of.
        pack = pack_of(winner.candidate.kernel.name)
    own = {
        "problem": problem,
        "match": match,
        "measured": winner.problem,
        "distance": 0.0 if match is Match.EXACT else problem.distance(winner.problem),
        "use": use,
        "config": documents.config(winner.candidate, pack),
    }
    return Answer(**{name: getattr(winner, name) for name in _SAME_IN_BOTH} | own)


def _predicted(
    problem: Problem, device: DeviceModel, prediction: Prediction, pack_of: PackOf
) -> Answer:
    candidate = prediction.candidate
    return Answer(
        problem=problem,
        match=Match.PREDICTED,
        measured=None,
        distance=None,
        use=Use.CUBLAS,
        config=documents.config(candidate, pack_of(candidate.kernel.name)),
        baseline=None,
        conditions=None,
        device=device,
        environment=None,
        revision=None,
        promoted_at=None,
        replayed=False,
        predicted_us=prediction.us,
        **UNMEASURED,
    )


class Chart:
    """The problems of one store that have winners, on all device models, in memory.

    So neighbours cost no query of their own. No answer is older than the store: every change of
    what is served takes a new sequence, a problem that has a winner keeps having one, and what is
    newer is read as it comes. Threads share a chart. While its context is entered, it is drawn in
    the background: 200,000 winners take 1 s.
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
        self.winners_of = store.winners_of

    def near(self, problem: Problem, device: str) -> list[tuple[Problem, Won]]:
        if not self._is_new:
            self._chart.catch_up()
            self._is_new = True
        return self._chart.near(problem, device)

    def pack_for(self, kernel: str) -> str | None:
        return (self._chart if self._is_new else self._store).pack_for(kernel)
