"""Winners: history is kept, and one row per (problem, device) is current.

Which row is current is decided when rows change, never when they are read. A new winner becomes
current unless the current one is pinned or has a better origin: measured here beats measured
elsewhere and imported, which beats replayed. A winner without a trusted signature is kept in the
history and never current, unless the import allows it (`tuner.store.imports`). Promoting the
current winner again changes nothing, so importing or replaying twice leaves no trace. Every change
has its entry in the audit; an import writes one for its whole file. Whether a winner is stale is
determined when it is read, see `tuner.store.gpus`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf
from types import MappingProxyType

from sqlalchemy import Select, bindparam, func, select, update
from sqlalchemy.orm import Session

from gemmsmith.answers.history import Origin
from gemmsmith.core.config import Use
from gemmsmith.core.kernel import AnyKernel
from gemmsmith.core.neighbours import NEIGHBOURS, Neighbourhood
from gemmsmith.core.problem import Layout, Problem
from gemmsmith.errors import InvalidProblem
from tuner.errors import JobAborted
from tuner.store.audit import LOCAL, Action, record
from tuner.store.codec import from_json_or_none, to_json
from tuner.store.database import Database
from tuner.store.dictionary import Dictionary, Entry, asked, asked_ids, problem_of
from tuner.store.gpus import Gpus
from tuner.store.models import CURRENT, DeviceRow, JobRow, ProblemRow, WinnerRow
from tuner.store.sql import equal
from tuner.store.statement import canonical, fingerprint
from tuner.store.winner_rows import columns, references, winner_of
from tuner.trial import Winner, WinnerSignature

PROMOTION_LOCK = 0x67656D77  # promotions queue up, so that revisions and sequences have no gaps

RANK = {Origin.REPLAYED: 0, Origin.UNSIGNED: 1, Origin.IMPORTED: 2, Origin.MEASURED: 3}


class Winners:
    """The table of winners."""

    def __init__(self, database: Database, dictionary: Dictionary, gpus: Gpus) -> None:
        self._database = database
        self._dictionary = dictionary
        self._gpus = gpus

    def promote(self, winner: Winner) -> Winner:
        """Add a winner that was measured here, and make it current if the module's rule says so.

        Returns the winner as it is stored, with its revision.

        Raises:
            JobAborted: the winner's job is to be cancelled; nothing was changed.
        """
        winner = canonical(winner)
        origin = origin_of(winner, Origin.MEASURED)
        digest = fingerprint(winner)
        values = columns(winner, origin, digest)  # before the transaction, which others wait for
        with self._database.write() as session:
            self._database.lock(session, PROMOTION_LOCK)
            worker = _worker_of(session, winner.job)
            ids = self._dictionary.ids(session, entries(winner))
            self.heal(session, [winner.candidate.kernel] if winner.candidate else [])
            history = [*session.scalars(history_of(ids[winner.problem], ids[winner.device]))]
            current = next((row for row in history if row.is_current), None)
            is_best = current is None or (
                RANK[origin] >= RANK[Origin(current.origin)] and not current.pinned
            )
            same = _same(digest, current, [] if is_best else history, origin)
            if same is not None:
                row = same
                if winner.pack not in (None, row.pack):  # its answer names another pack now
                    row.pack, row.sequence = winner.pack, next_sequence(session)
                if row.signature is None and winner.signature is not None:
                    row.signature = to_json(winner.signature)
            else:
                revision = 1 + max((row.revision for row in history), default=0)
                row = WinnerRow(**values, **references(winner, ids), revision=revision)
                session.add(row)
                if is_best:
                    make_current(session, row, current)
                    actor, job = worker or LOCAL, winner.job
                    record_change(
                        session, Action.PROMOTED, winner, row, current, actor=actor, job=job
                    )
            session.flush()
            in_use = self._gpus.in_use(session)
            stored = replace(
                winner,
                revision=row.revision,
                promoted_at=row.promoted_at,
                pack=row.pack,
                stale=in_use.makes_stale(row, winner.environment),
                pinned=row.pinned,
                signature=from_json_or_none(WinnerSignature, row.signature),
                origin=Origin(row.origin),
                digest=row.digest,
            )
        self._dictionary.keep(ids)
        return stored

    def current(self, problem: Problem, device: str) -> Winner | None:
        """What is served for exactly this problem on the device model with that slug.

        One indexed read.
        """
        return next(iter(self.of([problem], device)), None)

    def of(self, problems: Iterable[Problem], device: str) -> list[Winner]:
        """As `current`, for many problems at once, in no order; some may have no winner."""
        query = _of_problems(on_sqlite=self._database.is_sqlite)
        with self._database.read() as session:
            rows = session.execute(query, asked(problems) | {"slug": device}).all()
            return self.read(session, rows)

    def heal(self, session: Session, kernels: Iterable[AnyKernel]) -> None:
        """Correct kernels' descriptions. Answers with such a kernel change: they get a sequence."""
        if healed := self._dictionary.heal(session, kernels):
            answered = WinnerRow.is_current & WinnerRow.kernel_id.in_(healed)
            session.execute(
                update(WinnerRow).where(answered).values(sequence=next_sequence(session))
            )

    def find(
        self,
        *,
        device: str | None = None,
        dtype: str | None = None,
        layout: Layout | None = None,
        use: Use | None = None,
        sizes: Mapping[str, int] = MappingProxyType({}),
        min_speedup: float | None = None,
        after: Problem | None = None,
        limit: int | None = None,
    ) -> list[Winner]:
        """Current winners in a fixed order (first tuned, first listed), behind the problem `after`.

        `sizes` fixes some of m, n, k and batch; `min_speedup` leaves out what gains less. Pages
        are exact for one device; without `device` a page may cut a problem's devices apart.

        Raises:
            InvalidProblem: `after` was never tuned, so no page ended with it.
        """
        # A page is read along the index of current winners, which has its order. With `slug + ""`
        # SQLite does not see that another index has the device: it would use that one, gather all
        # of the device's winners and sort them.
        all_of_them = limit is None
        query = _select().where(WinnerRow.is_current if all_of_them else CURRENT)
        query = query.where(*(getattr(ProblemRow, name) == size for name, size in sizes.items()))
        if min_speedup is not None:
            query = query.where(WinnerRow.speedup >= min_speedup)
        conditions = (
            (DeviceRow.slug if all_of_them else DeviceRow.slug + "", device),
            (WinnerRow.use, use),
            (ProblemRow.dtype, dtype),
            (ProblemRow.layout, layout),
        )
        query = query.where(*equal(*conditions))
        with self._database.read() as session:
            if after is not None:
                last = self._dictionary.problem_id(session, after)
                if last is None:
                    raise InvalidProblem("after", f"no page of winners ends with {after}")
                query = query.where(WinnerRow.problem_id > last)
            query = query.order_by(WinnerRow.problem_id, WinnerRow.device_id).limit(limit)
            return self.read(session, session.execute(query).all())

    def unanswered(self, limit: int | None = None) -> list[Winner]:
        """Winners from elsewhere that are not answered, as no trusted key signed them.

        They were never current. First tuned first.
        """
        query = _select().where(WinnerRow.origin == Origin.UNSIGNED.value, WinnerRow.sequence == 0)
        query = query.order_by(WinnerRow.problem_id, WinnerRow.device_id, WinnerRow.id)
        with self._database.read() as session:
            return self.read(session, session.execute(query.limit(limit)).all())

    def near(
        self, problem: Problem, device: str, limit: int = NEIGHBOURS, reach: float = inf
    ) -> list[Winner]:
        """Current winners of the same kind (`Problem.kind`); nearest in log2 m, n, k first.

        At most `limit`, none farther than `reach` octaves. Of equal distances, the problem that
        was recorded first.
        """
        # Read from the indexes alone: winners' rows are large.
        query = (
            select(ProblemRow.id, ProblemRow.m, ProblemRow.n, ProblemRow.k, ProblemRow.batch)
            .join(WinnerRow, WinnerRow.problem_id == ProblemRow.id)
            .join(DeviceRow, DeviceRow.id == WinnerRow.device_id)
            .where(CURRENT, DeviceRow.slug == device)
            .where(ProblemRow.operation == problem.operation.key)
        )
        if problem.operation.summation is None:
            query = query.where(ProblemRow.batch == problem.batch)
        around = Neighbourhood[None]()
        with self._database.read() as session:
            for row_id, m, n, k, batch in session.execute(query):
                there = Problem.unchecked(
                    m, n, k, batch=batch, dtype=problem.dtype, layout=problem.layout
                )
                around.put(there, row_id, None)
        near = [there for there, _ in around.nearest(problem, limit, reach)]
        winners = {winner.problem: winner for winner in self.of(near, device)}
        return [winners[there] for there in near if there in winners]

    def sequence(self) -> int:
        """A number that grows whenever any answer changes; 0 without answers."""
        with self._database.read() as session:
            return session.scalar(select(func.max(WinnerRow.sequence))) or 0

    def read(
        self, session: Session, rows: Sequence[tuple[WinnerRow, ProblemRow | Problem]]
    ) -> list[Winner]:
        """The winners that rows of the table describe."""
        if not rows:
            return []
        kernels = self._dictionary.kernels(
            session, (row.kernel_id for row, _ in rows if row.kernel_id is not None)
        )
        in_use = self._gpus.in_use(session)
        winners = []
        for row, there in rows:
            problem = problem_of(there) if isinstance(there, ProblemRow) else there
            environment = self._dictionary.environment(session, row.environment_id)
            device = self._dictionary.device(session, row.device_id)
            stale = in_use.makes_stale(row, environment)
            kernel = kernels.get(row.kernel_id or 0)  # no row has the id 0
            winners.append(winner_of(row, problem, device, environment, kernel, stale=stale))
        return winners


def _same(
    digest: str, current: WinnerRow | None, history: Sequence[WinnerRow], origin: Origin
) -> WinnerRow | None:
    """The row of an equal winner, which needs no new revision: the current one.

    Where a winner cannot become current, there is a `history`, and the newest row of its origin
    counts too: a job that begins again adds nothing.
    """
    of_origin = (row for row in history if Origin(row.origin) is origin)
    newest = max(of_origin, key=lambda row: row.revision, default=None)
    return next(
        (row for row in (current, newest) if row is not None and row.digest == digest), None
    )


def _select() -> Select[WinnerRow, ProblemRow]:
    return (
        select(WinnerRow, ProblemRow)
        .join(ProblemRow, ProblemRow.id == WinnerRow.problem_id)
        .join(DeviceRow, DeviceRow.id == WinnerRow.device_id)
    )


@functools.cache
def _of_problems(*, on_sqlite: bool) -> Select[WinnerRow, ProblemRow]:
    # Made once: that takes longer than to read a winner.
    query = _select().where(CURRENT, DeviceRow.slug == bindparam("slug"))
    return query.where(WinnerRow.problem_id.in_(asked_ids(on_sqlite=on_sqlite)))


def history_of(problem_id: int, device_id: int) -> Select[WinnerRow]:
    """Every revision promoted for a problem on a device model, newest first."""
    query = select(WinnerRow).where(
        WinnerRow.problem_id == problem_id, WinnerRow.device_id == device_id
    )
    return query.order_by(WinnerRow.revision.desc())


def make_current(session: Session, row: WinnerRow, current: WinnerRow | None) -> None:
    """Serve `row` in place of `current`, under the next sequence."""
    if current is not None:
        current.is_current = False
        session.flush()  # first: a unique index forbids two current rows within a transaction too
    row.is_current = True
    row.sequence = next_sequence(session)


def next_sequence(session: Session) -> int:
    """The sequence of a row that becomes current now, or whose answer changes."""
    return 1 + (session.scalar(select(func.max(WinnerRow.sequence))) or 0)


def _worker_of(session: Session, job: str | None) -> str | None:
    """The worker that owns the job; None if the queue does not have it.

    Raises:
        JobAborted: the job is to be cancelled.
    """
    query = select(JobRow.owner, JobRow.cancel_requested).where(JobRow.public_id == job)
    owner, cancel_requested = session.execute(query).one_or_none() or (None, False)
    if cancel_requested:
        raise JobAborted("cancelled before its winner was promoted; its trials are kept")
    return owner


def record_change(
    session: Session,
    action: Action,
    winner: Winner,
    row: WinnerRow,
    before: WinnerRow | None,
    *,
    actor: str,
    **detail: str | None,
) -> None:
    """Record that `row`, which holds `winner`, is served in place of `before`."""
    subject = f"{winner.problem} on {winner.device.slug}"
    replaced = before.revision if before else None
    record(
        session, action, subject, actor=actor, revision=row.revision, replaced=replaced, **detail
    )


def origin_of(winner: Winner, origin: Origin) -> Origin:
    """A replayed winner has the lowest origin, wherever it was replayed."""
    # Unless it is unsigned: that it was replayed is a claim like any other then.
    replayed = winner.replayed and origin is not Origin.UNSIGNED
    return Origin.REPLAYED if replayed else origin


def entries(winner: Winner) -> list[Entry]:
    entries: list[Entry] = [winner.problem, winner.device, winner.environment]
    return [*entries, winner.candidate.kernel] if winner.candidate else entries
