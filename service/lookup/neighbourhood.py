"""What lookups have to know of the store: which measured problem is near, and a kernel's pack.

One look at the store's marks tells whether what was read before is still so; else a query would be
made for each question, which among hundreds of thousands of winners takes 40 ms. No answer is older
than the store. Every change of what is served takes a new sequence, and a problem that has a winner
keeps having one: what is newer is read as it comes.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Self

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.config import Use
from gemmsmith.core.neighbours import NEIGHBOURS, answering
from gemmsmith.core.problem import Problem
from service.lookup.find import REACH, is_legal
from tuner.errors import StoreError
from tuner.store import Store
from tuner.store.changes import newest
from tuner.store.served import Place
from tuner.trial import Winner

if TYPE_CHECKING:
    from numpy import float64, int64
    from numpy.typing import NDArray

MANY = 5_000
"""Winners from which the chart is drawn before somebody asks: 200,000 take 1 s."""

_Kind = tuple[str | int, ...]
"""A device model's slug, and `Problem.kind`."""


class _Near(NamedTuple):
    """A winner, as the chart knows it."""

    problem: Problem
    use: Use
    candidate: Candidate | None


class _Alike(NamedTuple):
    """The winners' problems of one kind, a column each, by id. Never changed, only replaced."""

    ids: NDArray[int64]
    sizes: NDArray[int64]  # M, N and K
    logs: NDArray[float64]
    runs: NDArray[int64]  # places in `Chart._runs`

    def with_(self, other: _Alike) -> _Alike:
        """These and the others, which take the place of those with their ids."""
        import numpy

        ids = numpy.concatenate([self.ids, other.ids])
        order = numpy.argsort(ids, kind="stable")
        last = numpy.append(ids[order][1:] != ids[order][:-1], True)
        both = zip(self, other, strict=True)
        return _Alike(*(numpy.concatenate(pair, axis=-1)[..., order[last]] for pair in both))

    def squares(self, problem: Problem) -> NDArray[float64]:
        """Squared distances from the problem, computed as the store's queries do."""
        m, n, k = (
            column - there for column, there in zip(self.logs, problem.log_extents, strict=True)
        )
        found: NDArray[float64] = m * m + n * n + k * k
        return found

    def nearest(self, problem: Problem, limit: int, reach: float) -> list[int]:
        """Places of those within reach, nearest first, then by id."""
        import numpy

        squares = self.squares(problem)
        within = numpy.flatnonzero(squares <= reach * reach)
        if len(within) > limit:
            there = squares[within]
            within = within[there <= numpy.partition(there, limit - 1)[limit - 1]]
        order = numpy.argsort(squares[within], kind="stable")  # by id already
        places: list[int] = within[order[:limit]].tolist()
        return places


class Chart:
    """The problems of one store that have winners, on all device models. Threads share it.

    While its context is entered, it is drawn in the background where that will take long.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._drawing = threading.Lock()
        self._sequence = 0
        self._packs: tuple[int, int, int] | None = None
        self._pack_of: dict[str, str] = {}
        self._alike: dict[_Kind, _Alike] = {}
        self._runs: list[tuple[Use, Candidate | None]] = []
        self._run_of: dict[tuple[Use, Candidate | None], int] = {}
        self._ahead = threading.Thread(target=self._draw_ahead, name="chart", daemon=True)

    def __enter__(self) -> Self:
        self._ahead.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ahead.join()

    def _draw_ahead(self) -> None:
        try:
            if self._store.changes.served()[0] >= MANY:
                self.catch_up()
        except StoreError:
            pass  # whoever asks will be told

    @property
    def is_drawn(self) -> bool:
        """Whether anything is."""
        return bool(self._alike)

    def has_near(self, problem: Problem, device: str) -> bool:
        """Whether a problem of its kind within reach has a winner, as far as is drawn."""
        alike = self._alike.get(_kind(problem, device))
        return alike is not None and bool((alike.squares(problem) <= REACH * REACH).any())

    def nearest(self, problem: Problem, device: str) -> Iterator[_Near]:
        """The winners around the problem, nearest first, as far as is drawn."""
        alike = self._alike.get(_kind(problem, device))
        if alike is None:
            return
        for place in alike.nearest(problem, NEIGHBOURS, REACH):
            m, n, k = alike.sizes[:, place].tolist()
            there = Problem(
                m=m, n=n, k=k, batch=problem.batch, dtype=problem.dtype, layout=problem.layout
            )
            yield _Near(there, *self._runs[alike.runs[place]])

    def answering(self, problem: Problem, device: str) -> Problem | None:
        """The problem whose winner answers for this one, as far as is drawn."""
        nearest = self.nearest(problem, device)
        found = answering(problem, nearest, lambda near: is_legal(near.candidate, problem))
        return None if found is None else found.problem

    def won_near(self, problem: Problem, device: str) -> Iterator[tuple[Problem, str]]:
        """As `WinnerSource.won_near`, as far as is drawn."""
        for near in self.nearest(problem, device):
            if near.candidate is not None and not near.use.is_default:
                yield near.problem, near.candidate.kernel.name

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
        with self._drawing:
            sequence, packs = self._store.changes.served()
            if packs != self._packs:
                self._pack_of = newest(self._store.changes.packed())
                self._packs = packs
            known = self._alike if sequence >= self._sequence else {}  # else: another database
            if sequence != self._sequence:
                since = self._sequence if known else 0
                self._alike = known | self._drawn(known, self._store.served.places(since))
                self._sequence = sequence

    def _drawn(self, known: dict[_Kind, _Alike], newer: Iterable[Place]) -> dict[_Kind, _Alike]:
        import numpy

        rows: dict[_Kind, array[float]] = {}
        places: dict[tuple[Use, int], int] = {}
        for each in newer:
            same = (each.use, id(each.candidate))  # each is made once while they are read
            run = places.get(same)
            if run is None:
                run = places[same] = self._place(each.use, each.candidate)
            row = (each.problem_id, *each.sizes, *each.logs, run)
            kind = (each.device, *each.kind)
            if kind not in rows:
                rows[kind] = array("d")
            rows[kind].extend(row)
        found = {}
        for kind, numbers in rows.items():
            table = numpy.frombuffer(numbers).reshape(-1, 8)
            columns = table[table[:, 0].argsort()].T
            ids, sizes, runs = (part.astype(int) for part in (columns[0], columns[1:4], columns[7]))
            alike = _Alike(ids, sizes, columns[4:7].copy(), runs)
            found[kind] = known[kind].with_(alike) if kind in known else alike
        return found

    def _place(self, use: Use, candidate: Candidate | None) -> int:
        place = self._run_of.setdefault((use, candidate), len(self._runs))
        if place == len(self._runs):
            self._runs.append((use, candidate))
        return place


def _kind(problem: Problem, device: str) -> _Kind:
    return (device, *problem.kind)


class Charted:
    """A store's winners for one call, read only where the chart has any. A `WinnerSource`."""

    def __init__(self, store: Store, chart: Chart) -> None:
        self._store = store
        self._chart = chart

    def winner(self, problem: Problem, device_slug: str) -> Winner | None:
        """The current winner for exactly this problem."""
        # The first chart is drawn when somebody asks for a neighbour: it takes NumPy.
        if self._chart.is_drawn and self._is_alone(problem, device_slug):
            return None
        return self._store.winner(problem, device_slug)

    def near_winners(
        self, problem: Problem, device_slug: str, limit: int, reach: float
    ) -> Iterator[Winner]:
        """The one that answers, else current winners of the same kind, nearest first."""
        if self._is_alone(problem, device_slug) or not self._caught_up:
            return
        near = self._chart.answering(problem, device_slug)
        if near is None:
            return
        found = self._store.winner(near, device_slug)
        if found is not None:
            yield found
        # It is another one since: then the store tells.
        yield from self._store.near_winners(problem, device_slug, limit, reach)

    def won_near(self, problem: Problem, device_slug: str) -> Iterator[tuple[Problem, str]]:
        """Problems nearby, and the kernels that won on them."""
        return self._chart.won_near(problem, device_slug)

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


class Together:
    """As `Charted`, for many problems: their winners, and those beside them, are read at once."""

    def __init__(
        self, store: Store, chart: Chart, problems: Sequence[Problem], device: str
    ) -> None:
        self._store = store
        self._chart = chart
        self._device = device
        self._exact = {found.problem: found for found in store.winners_of(problems, device)}
        self._others = [problem for problem in problems if problem not in self._exact]

    def winner(self, problem: Problem, _device_slug: str) -> Winner | None:
        """The current winner for exactly this problem."""
        return self._exact.get(problem)

    def near_winners(
        self, problem: Problem, device_slug: str, limit: int, reach: float
    ) -> Iterator[Winner]:
        """The one that answers, else current winners of the same kind, nearest first."""
        if problem in self._beside:
            yield self._beside[problem]
            yield from self._store.near_winners(problem, device_slug, limit, reach)

    def won_near(self, problem: Problem, device_slug: str) -> Iterator[tuple[Problem, str]]:
        """Problems nearby, and the kernels that won on them."""
        return self._chart.won_near(problem, device_slug)

    def pack_for(self, kernel: str) -> str | None:
        """Hash of the newest pack that holds the kernel."""
        if "_beside" in self.__dict__:
            return self._chart.pack_for(kernel)
        return self._store.pack_for(kernel)

    @cached_property
    def _beside(self) -> dict[Problem, Winner]:
        """The winner that answers for each problem that has none itself."""
        self._chart.catch_up()
        near = {problem: self._chart.answering(problem, self._device) for problem in self._others}
        wanted = {problem for problem in near.values() if problem is not None}
        found = {each.problem: each for each in self._store.winners_of(wanted, self._device)}
        return {
            problem: found[there]
            for problem, there in near.items()
            if there is not None and there in found
        }
