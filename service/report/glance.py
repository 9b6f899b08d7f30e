"""What the winners come to at a glance: by operation and GPU, and for the shipped suites.

Reading all winners takes a second where there are hundreds of thousands, so what was added up is
kept while no other winner is served, and for `FRESH_S` at least.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from gemmsmith.core.operation import Operation, layouts_of
from gemmsmith.core.problem import Problem
from tuner.store import Store
from tuner.store.overview import Standing
from tuner.suites import Suite, SuiteError, load, shipped
from tuner.trial import Winner

FRESH_S = 5.0
"""How long what was added up is told, whatever is promoted meanwhile."""

COVERED, FEWEST = 0.5, 20
"""A suite is listed in the element types in which such a share, and so many, of its problems have a
winner: of fewer a sum says little."""

log = structlog.get_logger("gemmsmith.service")


@dataclass(frozen=True, kw_only=True, slots=True)
class SuiteSaving:
    """What a suite's problems take once each, or as often as the suite says they are run.

    Attributes:
        problems: how many the suite has in these types; `covered` of them have a winner, and the
            times are of those.
        default_us: what the defaults take together.
        saved_us: what callers are spared, from the paired ratios.
        weighted: whether the suite says how often its problems are run.
    """

    suite: str
    dtype: str
    problems: int
    covered: int
    default_us: float
    saved_us: float
    weighted: bool

    @property
    def share(self) -> float:
        """Of the defaults' time that is saved."""
        return self.saved_us / self.default_us


@dataclass(frozen=True, kw_only=True, slots=True)
class Glance:
    """All winners of all device models, and the suites on one of them."""

    standings: tuple[Standing, ...]
    suites: tuple[SuiteSaving, ...]


class Glances:
    """Glances at one store, by device model. Threads may share it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._reading = threading.Lock()
        self._kept: dict[str, tuple[int, float, Glance]] = {}

    def at(self, device: str) -> Glance:
        """What there is, with the suites on the device model with that slug."""
        with self._reading:  # once for all who ask
            sequence, _ = self._store.changes.served()
            known = self._kept.get(device)
            if known and (known[0] == sequence or time.monotonic() - known[1] < FRESH_S):
                return known[2]
            standings = tuple(self._store.overview.standings())
            mine = sorted({each.dtype for each in standings if each.device == device})
            glance = Glance(standings=standings, suites=tuple(_savings(self._store, device, mine)))
            self._kept[device] = (sequence, time.monotonic(), glance)
            return glance


def _savings(store: Store, device: str, dtypes: Sequence[str]) -> Iterator[SuiteSaving]:
    """Of every shipped suite in every type that the device has winners of, where enough have."""
    bases = sorted({Operation.of(dtype, _layout(dtype)).of_suites.dtype for dtype in dtypes})
    asked = [
        (suite, dtype, [(each.calls, problem) for each, problem in suite.problems(dtype)])
        for suite in _suites()
        for dtype in bases
    ]
    every = {problem for *_, listed in asked for _, problem in listed}
    winners = {winner.problem: winner for winner in store.winners_of(every, device)}
    for suite, dtype, listed in asked:
        saving = _saving(suite, dtype, listed, winners)
        if saving is not None:
            yield saving


def _saving(
    suite: Suite,
    dtype: str,
    listed: Sequence[tuple[int | None, Problem]],
    winners: dict[Problem, Winner],
) -> SuiteSaving | None:
    covered, default_us, saved_us = 0, 0.0, 0.0
    for calls, problem in listed:
        winner = winners.get(problem)
        if winner is None or winner.baseline is None:
            continue
        covered += 1
        default_us += winner.baseline.median_us * (calls or 1)
        if not winner.use.is_default and winner.speedup is not None:
            spared = winner.baseline.median_us * (1 - 1 / winner.speedup.median)
            saved_us += spared * (calls or 1)
    if covered < max(FEWEST, COVERED * len(listed)):
        return None
    return SuiteSaving(
        suite=suite.name,
        dtype=dtype,
        problems=len(listed),
        covered=covered,
        default_us=default_us,
        saved_us=saved_us,
        weighted=any(calls is not None for calls, _ in listed),
    )


def _layout(dtype: str) -> str:
    """Any layout that the type exists in."""
    return layouts_of(dtype)[0].value


@functools.cache
def _suites() -> tuple[Suite, ...]:
    """The shipped ones; one that cannot be read is left out, and the log says why."""
    return tuple(_read(sorted(shipped().glob("*.toml"))))


def _read(paths: Iterable[Path]) -> Iterator[Suite]:
    for path in paths:
        try:
            yield load(path)
        except SuiteError as error:
            log.warning("suite unusable", error=str(error))
