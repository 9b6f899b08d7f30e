"""Lists for the pages: current winners in an order, and a problem's trials by rank.

Read models: plain data, a transaction of its own for each call, nothing written.

Pages are keyset pages, so that the last costs as much as the first. A search that few problems meet
(`NARROW`) lists these and sorts them in any order. A wide one walks an index until the page is
full.
"""

from __future__ import annotations

import builtins
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import ColumnElement, Row, Select, func, or_, select, tuple_
from sqlalchemy.orm import InstrumentedAttribute, Session

from gemmsmith.answers.answer import Ratio
from gemmsmith.core.config import Use
from gemmsmith.core.kernel import AnyKernel
from gemmsmith.core.problem import Layout, Problem
from tuner.store.codec import from_json_or_none
from tuner.store.database import Database
from tuner.store.dictionary import Dictionary, problem_of
from tuner.store.gpus import Gpus
from tuner.store.models import CURRENT, ProblemRow, TrialRow, WinnerRow
from tuner.store.trials import BRIEFLY, StoredTrial, Trials
from tuner.trial import Phase

NARROW = 5_000
"""Problems up to which a search's matches are listed first and sorted after."""


class Order(StrEnum):
    """The order of winners."""

    GAIN = "gain"  # farthest ahead of the default first
    LOSS = "loss"  # farthest behind first
    TIME = "time"  # longest first
    SIZE = "size"  # element types, layout, batch, then M, N and K


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """Conditions on problems; None and () are met by all.

    Attributes:
        extents: sizes; each must be M, N or K.
        operations: keys, one of which the operation must have; None for any operation.
        layers: out and in features; the problem must be the product of a pass of one of them.
        use: what callers run.
    """

    dtype: str | None = None
    layout: Layout | None = None
    m: int | None = None
    n: int | None = None
    k: int | None = None
    batch: int | None = None
    extents: tuple[int, ...] = ()
    operations: tuple[str, ...] | None = None
    layers: tuple[tuple[int, int], ...] = ()
    use: Use | None = None

    @property
    def operation(self) -> str | None:
        if self.dtype is None or self.layout is None:
            return None
        return f"{self.dtype}.{self.layout.value}"


EVERYTHING = Search()


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """A current winner as a line of a list.

    Attributes:
        median_us, baseline_us: of the best candidate and of the default.
    """

    id: int
    problem: Problem
    use: Use
    kernel: AnyKernel | None
    median_us: float | None
    baseline_us: float | None
    speedup: Ratio | None
    revision: int
    pinned: bool
    replayed: bool
    stale: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """Some winners in order.

    Attributes:
        order: the actual order; another than the requested one if that was not possible.
        total: how many there are in all; None if the search is wide.
        following: cursor of the next page; None at the end.
    """

    items: tuple[Listed, ...]
    order: Order
    total: int | None
    following: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranking:
    """A problem's trials: of each candidate the latest, one in finals rather than in the screening.

    Attributes:
        measured: the best, fastest first; those that were in finals come before all others.
        failed: candidates whose latest trial failed, the newest first.
        finalists: measured trials of the latest finals, fastest first.
        measured_total, failed_total: how many there are of each, listed or not.
    """

    measured: tuple[StoredTrial, ...]
    failed: tuple[StoredTrial, ...]
    finalists: tuple[StoredTrial, ...]
    measured_total: int
    failed_total: int


class Listing:
    """Read models of one database. Threads may share it."""

    def __init__(
        self, database: Database, dictionary: Dictionary, gpus: Gpus, trials: Trials
    ) -> None:
        self._database = database
        self._dictionary = dictionary
        self._gpus = gpus
        self._trials = trials

    def winners(
        self,
        device: str,
        search: Search = EVERYTHING,
        order: Order = Order.GAIN,
        *,
        after: int | None = None,
        limit: int = 50,
    ) -> Page:
        """Current winners of the device model with that slug; `after` is a page's cursor.

        A cursor of a row that does not exist gives the first page.
        """
        with self._database.read() as session:
            device_id = self._dictionary.device_id(session, device)
            narrow = session.scalars(
                select(ProblemRow.id).where(*_met(search)).limit(NARROW + 1)
            ).all()
            total = None
            if len(narrow) <= NARROW:
                # `+ 0` matches no index of devices, so SQLite uses the index of problems.
                query = _all().where(
                    CURRENT, WinnerRow.problem_id.in_(narrow), WinnerRow.device_id + 0 == device_id
                )
            elif order is Order.SIZE:
                query = _walking(search, device_id)
            else:
                # Walks `ix_winners_gain`. Time has no index, so that order is for narrow searches
                # only.
                query = _all().where(CURRENT, *_met(search), WinnerRow.device_id == device_id)
                order = Order.GAIN if order is Order.TIME else order
            if search.use is not None:
                query = query.where(WinnerRow.use == search.use.value)
            if len(narrow) <= NARROW:
                total = session.scalar(select(func.count()).select_from(query.subquery())) or 0
            # A cursor is the id of the last winner shown: its sort key never changes, and history
            # is kept.
            last = None if after is None else _row(session, after)
            if order is Order.SIZE:
                rows = _by_size(session, query, last, limit + 1)
            else:
                rows = _by_value(session, query, order, last, limit + 1)
            items = self._listed(session, rows[:limit])
            return Page(
                items=items,
                order=order,
                total=total,
                following=items[-1].id if len(rows) > limit else None,
            )

    def map(
        self, device: str, dtype: str, layout: Layout, k: int, batch: int, limit: int
    ) -> builtins.list[Listed]:
        """Current winners of these types, layout, K and batch, by M and N."""
        search = Search(dtype=dtype, layout=layout, k=k, batch=batch)
        with self._database.read() as session:
            device_id = self._dictionary.device_id(session, device)
            rows = _by_size(session, _walking(search, device_id), None, limit)
            return [*self._listed(session, rows)]

    def depths(self, dtype: str, layout: Layout) -> builtins.list[tuple[int, int, int]]:
        """K and batch of the known problems, and how many have them; most first, 60 at most."""
        count = func.count()
        query = (
            select(ProblemRow.k, ProblemRow.batch, count)
            .where(*_met(Search(dtype=dtype, layout=layout)))
            .group_by(ProblemRow.batch, ProblemRow.k)
            .order_by(count.desc(), ProblemRow.batch, ProblemRow.k)
            .limit(60)
        )
        with self._database.read() as session:
            return [(k, batch, problems) for k, batch, problems in session.execute(query)]

    def ranking(self, problem: Problem, device: str, limit: int = 50) -> Ranking:
        """The problem's trials on that device model; `limit` measured and as many failed ones."""
        query = BRIEFLY.order_by(TrialRow.id)
        with self._database.read() as session:
            rows = session.execute(
                query.where(
                    TrialRow.problem_id == self._dictionary.problem_id(session, problem),
                    TrialRow.device_id == self._dictionary.device_id(session, device),
                )
            ).all()
        latest: dict[tuple[int, str], Any] = {}
        for row in rows:
            # Rows come oldest first. A screening does not replace an earlier trial in finals.
            known = latest.get((row.kernel_id, row.launch_key))
            if known is None or not _is_final(known) or _is_final(row):
                latest[row.kernel_id, row.launch_key] = row
        measured = sorted(
            (row for row in latest.values() if row.median_us is not None),
            key=lambda row: (not _is_final(row), row.median_us, row.id),
        )
        failed = [row for row in reversed(latest.values()) if row.median_us is None]
        finals = [row for row in rows if _is_final(row) and row.median_us is not None]
        newest = [
            row
            for row in finals
            if (row.job, row.environment_id) == (finals[-1].job, finals[-1].environment_id)
        ]
        newest.sort(key=lambda row: (row.median_us, row.id))
        return Ranking(
            measured=self._trials.of_ids([row.id for row in measured[:limit]]),
            failed=self._trials.of_ids([row.id for row in failed[:limit]]),
            finalists=self._trials.of_ids([row.id for row in newest]),
            measured_total=len(measured),
            failed_total=len(failed),
        )

    def _listed(
        self, session: Session, rows: Sequence[Row[WinnerRow, ProblemRow]]
    ) -> tuple[Listed, ...]:
        kernels = self._dictionary.kernels(
            session, (row.kernel_id for row, _ in rows if row.kernel_id is not None)
        )
        in_use = self._gpus.in_use(session)
        return tuple(
            Listed(
                id=row.id,
                problem=problem_of(problem),
                use=Use(row.use),
                kernel=None if row.kernel_id is None else kernels.get(row.kernel_id),
                median_us=row.median_us,
                baseline_us=(row.record["baseline"] or {}).get("median_us"),
                speedup=from_json_or_none(Ratio, row.record["speedup"]),
                revision=row.revision,
                pinned=row.pinned,
                replayed=row.replayed,
                stale=in_use.makes_stale(
                    row, self._dictionary.environment(session, row.environment_id)
                ),
            )
            for row, problem in rows
        )


_SIZE = (ProblemRow.operation, ProblemRow.batch, ProblemRow.m, ProblemRow.n, ProblemRow.k)
"""The columns of the problems' index, in its order."""


def _all() -> Select[WinnerRow, ProblemRow]:
    return select(WinnerRow, ProblemRow).join(ProblemRow, ProblemRow.id == WinnerRow.problem_id)


def _walking(search: Search, device_id: int | None) -> Select[WinnerRow, ProblemRow]:
    """Current winners, for SQLite to walk the problems in the order of their index."""
    # An expression with `+ 0` matches no index: so SQLite neither starts from the winners nor
    # sorts.
    joined = select(WinnerRow, ProblemRow).join(
        ProblemRow, ProblemRow.id + 0 == WinnerRow.problem_id
    )
    return joined.where(CURRENT, WinnerRow.device_id + 0 == device_id, *_met_walking(search))


def _met(search: Search) -> builtins.list[ColumnElement[bool]]:
    equal = [column == value for column, value in _sizes(search).items()]
    return equal + _words(search) + _extents(search)


def _met_walking(search: Search) -> builtins.list[ColumnElement[bool]]:
    """As `_met`, for an index walk."""
    # The index's leading columns, as far as the search fixes them, are compared by `=`. Those
    # behind a column that may have any value are ranges: by `=`, SQLite would sort.
    sizes = _sizes(search)
    leading = [*itertools.takewhile(sizes.__contains__, _SIZE)]
    return [
        column == value if column in leading else column.between(value, value)
        for column, value in sizes.items()
    ] + [*_words(search), *_extents(search)]


def _sizes(search: Search) -> dict[InstrumentedAttribute[Any], Any]:
    values = {column: getattr(search, column.key) for column in _SIZE}
    return {column: value for column, value in values.items() if value is not None}


def _words(search: Search) -> builtins.list[ColumnElement[bool]]:
    """Conditions on the operation, if the search is not for a single one."""
    words: builtins.list[ColumnElement[bool]] = []
    if search.operation is None and search.layout is not None:
        words.append(ProblemRow.layout == search.layout.value)
    elif search.operation is None and search.dtype is not None:
        # The range is for the index: an operation's key ends in the layout's letters.
        first, last = f"{search.dtype}.{Layout.NN.value}", f"{search.dtype}.{Layout.TT.value}"
        words += [ProblemRow.operation.between(first, last), ProblemRow.dtype == search.dtype]
    if search.operations is not None:
        words.append(ProblemRow.operation.in_(search.operations))
    return words


def _extents(search: Search) -> builtins.list[ColumnElement[bool]]:
    sizes = (ProblemRow.m, ProblemRow.n, ProblemRow.k)
    conditions = [or_(*(column == extent for column in sizes)) for extent in search.extents]
    if search.layers:  # forward, input gradient, and weight gradients of both orders
        m, n, k = sizes
        pairs = [(n, k), (k, n), (m, n), (n, m)]
        conditions.append(or_(*((a == x) & (b == y) for x, y in search.layers for a, b in pairs)))
    return conditions


def _row(session: Session, winner_id: int) -> Row[WinnerRow, ProblemRow] | None:
    return session.execute(_all().where(WinnerRow.id == winner_id)).one_or_none()


def _by_size(
    session: Session,
    query: Select[WinnerRow, ProblemRow],
    last: Row[WinnerRow, ProblemRow] | None,
    limit: int,
) -> Sequence[Row[WinnerRow, ProblemRow]]:
    if last is not None:
        values = [getattr(last[1], column.key) for column in _SIZE]
        query = query.where(tuple_(*_SIZE) > tuple_(*values))
    return session.execute(query.order_by(*_SIZE).limit(limit)).all()


def _by_value(
    session: Session,
    query: Select[WinnerRow, ProblemRow],
    order: Order,
    last: Row[WinnerRow, ProblemRow] | None,
    limit: int,
) -> builtins.list[Row[WinnerRow, ProblemRow]]:
    """By a column of the winners; those without a value come last, the newest first."""
    column = WinnerRow.median_us if order is Order.TIME else WinnerRow.speedup
    keys = (column, WinnerRow.id)
    rows: builtins.list[Row[WinnerRow, ProblemRow]] = []
    value = None if last is None else getattr(last[0], column.key)
    if last is None or value is not None:
        some = query.where(column.is_not(None))
        if last is not None:
            here, there = tuple_(*keys), tuple_(value, last[0].id)
            some = some.where(here > there if order is Order.LOSS else here < there)
        rising = order is Order.LOSS
        some = some.order_by(*(key.asc() if rising else key.desc() for key in keys))
        rows += session.execute(some.limit(limit)).all()
        last = None
    if len(rows) < limit:
        none = query.where(column.is_(None))
        if last is not None:
            none = none.where(WinnerRow.id < last[0].id)
        none = none.order_by(WinnerRow.id.desc()).limit(limit - len(rows))
        rows += session.execute(none).all()
    return rows


def _is_final(row: Any) -> bool:
    return bool(row.phase == Phase.FINAL.value)
