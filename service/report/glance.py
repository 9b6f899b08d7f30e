"""Sums over all winners: by operation, family and GPU, and for the shipped suites.

Reading hundreds of thousands of winners takes a second, so the sums are kept until another winner
is served, and for `FRESH_S` at least.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import structlog

from gemmsmith.core.operation import in_order, of_dtype
from gemmsmith.core.problem import Problem
from service.report import verdict
from service.report.headroom import kind
from tuner.store import Store
from tuner.store.overview import Standing
from tuner.suites import Suite, SuiteError, load, shipped
from tuner.trial import Winner

FRESH_S = 5.0
"""Least time in seconds that sums are kept, even if winners are promoted meanwhile."""

COVERED, FEWEST = 0.5, 20
"""A suite is listed in an element type if at least this share of its problems, and this many, have
a winner: a sum over fewer says little."""

log = structlog.get_logger("gemmsmith.service")


@dataclass(frozen=True, kw_only=True, slots=True)
class SuiteSaving:
    """The time of a suite's problems, each once or as often as the suite says it is run.

    Attributes:
        problems: how many the suite has in these types.
        covered: how many of them have a winner; the times are sums over these.
        default_us: time of the defaults.
        saved_us: time that callers save, from the paired ratios.
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
        return self.saved_us / self.default_us


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """The standings of the operations that are for the same, `gated layers` for example.

    Attributes:
        dtypes: of its operations, in order.
        sums: the standing of all of them together, by the slug of a device model.
    """

    name: str
    dtypes: tuple[str, ...]
    sums: Mapping[str, Standing]


def families(standings: Sequence[Standing]) -> list[Family]:
    """Sum standings by family, those with the most problems first."""
    members: dict[str, list[Standing]] = {}
    for item in standings:
        members.setdefault(kind(of_dtype(item.dtype)), []).append(item)
    listed = [
        Family(
            name=name,
            dtypes=in_order(item.dtype for item in items),
            sums={device: _sum(name, device, items) for device in {item.device for item in items}},
        )
        for name, items in members.items()
    ]
    return sorted(listed, key=lambda family: -sum(s.problems for s in family.sums.values()))


def _sum(name: str, device: str, standings: Sequence[Standing]) -> Standing:
    of_device = [item for item in standings if item.device == device]
    problems = sum(item.problems for item in of_device)
    return Standing(
        device=device,
        dtype=name,
        problems=problems,
        ahead=sum(item.ahead for item in of_device),
        saved=sum(item.saved * item.problems for item in of_device) / problems,
        most=max((item.most for item in of_device if item.most), default=None),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Glance:
    """All winners of all device models, and the suites on one of them.

    Attributes:
        unusable: the numbers of winners that are algorithms of another cuBLASLt than that of this
            machine, by its version.
    """

    standings: tuple[Standing, ...]
    unusable: Mapping[int, int]
    suites: tuple[SuiteSaving, ...]


class Glances:
    """Glances at a store, by device model. Threads may share it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._reading = threading.Lock()
        self._kept: dict[str, tuple[int, float, Glance]] = {}

    def at(self, device: str) -> Glance:
        """Return the sums over all winners, and the suites on the device model with that slug."""
        with self._reading:  # simultaneous requests wait, so that the winners are read once
            sequence, _ = self._store.changes.served()
            if kept := self._kept.get(device):
                read_sequence, read_at, glance = kept
                if read_sequence == sequence or time.monotonic() - read_at < FRESH_S:
                    return glance
            standings = tuple(self._store.overview.standings())
            dtypes = sorted({item.dtype for item in standings if item.device == device})
            savings = _savings(self._store, device, dtypes)
            unusable = verdict.other_libraries(self._store.overview.algorithms())
            glance = Glance(standings=standings, unusable=unusable, suites=tuple(savings))
            self._kept[device] = (sequence, time.monotonic(), glance)
            return glance


def _savings(store: Store, device: str, dtypes: Sequence[str]) -> Iterator[SuiteSaving]:
    """Yield the saving of each shipped suite in each type of `dtypes`, if enough is covered."""
    # A suite is tuned for a plain product's types, though its entries may be grouped or fused.
    bases = sorted({of_dtype(dtype).of_suites.dtype for dtype in dtypes})
    listings = [
        (suite, dtype, [(entry.calls, problem) for entry, problem in suite.problems(dtype)])
        for suite in _suites()
        for dtype in bases
    ]
    problems = {problem for *_, listed in listings for _, problem in listed}
    winners = {winner.problem: winner for winner in store.winners_of(problems, device)}
    for suite, dtype, listed in listings:
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
            # The paired ratio is more precise than the difference of two medians.
            share = 1 - 1 / winner.speedup.median
            saved_us += winner.baseline.median_us * share * (calls or 1)
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


@functools.cache
def _suites() -> list[Suite]:
    suites = []
    for path in sorted(shipped().glob("*.toml")):
        try:
            suites.append(load(path))
        except SuiteError as error:
            log.warning("suite unusable", error=str(error))
    return suites
