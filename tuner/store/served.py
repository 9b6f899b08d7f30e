"""All that is served, as far as snapshots and the search for neighbours have to know it.

Most of a winner is what it was measured with; that is not read here. So hundreds of thousands come
in seconds, one after the other, and take no memory that the caller does not keep them in.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Select, Text, cast, select
from sqlalchemy.orm import Session

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.config import Use
from gemmsmith.core.device import Environment
from gemmsmith.core.launch import Launch
from gemmsmith.core.operation import Layout
from gemmsmith.core.problem import Problem
from tuner.store.codec import from_json
from tuner.store.database import Database
from tuner.store.dictionary import Dictionary
from tuner.store.gpus import Gpus
from tuner.store.models import DeviceRow, KernelRow, ProblemRow, WinnerRow

_USES = {use.value: use for use in Use}
_LAYOUTS = {layout.value: layout for layout in Layout}

_AT_ONCE = 5_000
"""Rows that are in memory together, some 5 MB."""


class Served(NamedTuple):
    """A current winner: the fields of `tuner.trial.Winner` that say what is run, and why."""

    problem: Problem
    environment: Environment
    use: Use
    candidate: Candidate | None
    pack: str | None
    stale: bool
    saving_us: float | None
    time_us: float | None


class Won(NamedTuple):
    """What won on a problem, as far as a search for neighbours needs it."""

    use: Use
    candidate: Candidate | None

    @property
    def kernel_name(self) -> str | None:
        return self.candidate.kernel.name if self.candidate else None


class Place(NamedTuple):
    """Where a current winner is among the others. Few `won` are different objects."""

    device: str
    problem_id: int
    problem: Problem
    won: Won


class AllServed:
    """Reads of what is served."""

    def __init__(self, database: Database, dictionary: Dictionary, gpus: Gpus) -> None:
        self._database = database
        self._dictionary = dictionary
        self._gpus = gpus

    def on(
        self, device: str, *, since: int = 0, kernels: Collection[str] | None = None
    ) -> Iterator[Served]:
        """What is served on the device model with that slug, in no order.

        Only what became current after the sequence `since`, and only with these `kernels`, by
        name, where any are given.
        """
        query = _joined(*_SERVED).where(WinnerRow.is_current, WinnerRow.sequence > since)
        query = query.where(DeviceRow.slug == device)
        if kernels is not None:
            names = select(KernelRow.id).where(KernelRow.name.in_(kernels))
            query = query.where(WinnerRow.kernel_id.in_(names))
        with self._database.read() as session:
            candidates = _Candidates(session, self._dictionary)
            in_use = self._gpus.in_use(session)
            # Plainly: through the session each row would take twice as long.
            rows = session.connection().execute(query, execution_options={"yield_per": _AT_ONCE})
            for m, n, k, batch, dtype, layout, *rest in rows:
                use, kernel, launch, median_us, speedup, pack, replayed, row_id, measured_in = rest
                environment = self._dictionary.environment(session, measured_in)
                yield Served(
                    # One's own tables hold problems that were checked.
                    problem=Problem.unchecked(
                        m, n, k, batch=batch, dtype=dtype, layout=_LAYOUTS[layout]
                    ),
                    environment=environment,
                    use=_USES[use],
                    candidate=candidates[kernel, launch],
                    pack=pack,
                    stale=not replayed and in_use.outdates(row_id, environment),
                    saving_us=None if None in (median_us, speedup) else median_us * (speedup - 1),
                    time_us=median_us,
                )

    def places(self, since: int) -> Iterator[Place]:
        """What became current after that sequence, on all device models, in no order."""
        query = _joined(*_PLACE).where(WinnerRow.is_current, WinnerRow.sequence > since)
        made: dict[tuple[str, int], Won] = {}
        with self._database.read() as session:
            candidates = _Candidates(session, self._dictionary)
            rows = session.connection().execute(query, execution_options={"yield_per": _AT_ONCE})
            for device, row_id, dtype, layout, batch, m, n, k, use, kernel, launch in rows:
                candidate = candidates[kernel, launch]
                won = made.setdefault((use, id(candidate)), Won(_USES[use], candidate))
                problem = Problem.unchecked(
                    m, n, k, batch=batch, dtype=dtype, layout=_LAYOUTS[layout]
                )
                yield Place(device, row_id, problem, won)


class _Candidates(dict[tuple[int | None, str | None], Candidate | None]):
    """Candidates by the kernel's id and the launch's JSON: there are few, so each is made once."""

    def __init__(self, session: Session, dictionary: Dictionary) -> None:
        super().__init__()
        self._session = session
        self._dictionary = dictionary

    def __missing__(self, key: tuple[int | None, str | None]) -> Candidate | None:
        kernel, launch = key
        candidate = None
        if kernel is not None and launch is not None:
            known = self._dictionary.kernels(self._session, [kernel])[kernel]
            stored = from_json(Launch, msgspec.json.decode(launch))
            candidate = Candidate(kernel=known, launch=stored)
        self[key] = candidate
        return candidate


_SERVED: tuple[Any, ...] = (
    *(ProblemRow.m, ProblemRow.n, ProblemRow.k, ProblemRow.batch),
    *(ProblemRow.dtype, ProblemRow.layout),
    *(WinnerRow.use, WinnerRow.kernel_id, cast(WinnerRow.launch, Text)),
    *(WinnerRow.median_us, WinnerRow.speedup, WinnerRow.pack, WinnerRow.replayed),
    *(WinnerRow.device_id, WinnerRow.environment_id),
)
_PLACE: tuple[Any, ...] = (
    *(DeviceRow.slug, ProblemRow.id, ProblemRow.dtype, ProblemRow.layout, ProblemRow.batch),
    *(ProblemRow.m, ProblemRow.n, ProblemRow.k),
    *(WinnerRow.use, WinnerRow.kernel_id, cast(WinnerRow.launch, Text)),
)


def _joined(*columns: Any) -> Select[Any]:
    query: Select[Any] = select(*columns)
    query = query.join(ProblemRow, ProblemRow.id == WinnerRow.problem_id)
    return query.join(DeviceRow, DeviceRow.id == WinnerRow.device_id)
