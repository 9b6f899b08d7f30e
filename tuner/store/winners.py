"""Winners: history is kept, and one row per (problem, device) is current.

Which row is current is settled when it changes, never when it is read. A new winner becomes
current unless the current one is pinned or is of a better origin: what was measured here counts
more than what was measured elsewhere and imported, and that more than what was replayed. Promoting
what is current already changes nothing, so importing or replaying twice leaves no trace. What does
change is in the audit, but for imports: who imports a whole file writes one entry for it. Whether
a winner is stale is told when it is read, see `tuner.store.gpus`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from types import MappingProxyType

from sqlalchemy import Row, Select, func, select
from sqlalchemy.orm import Session

from gemmsmith.answer import Conditions, Correctness, InRegime, Ratio, Statistics, Use
from gemmsmith.candidate import Candidate
from gemmsmith.errors import InvalidProblem
from gemmsmith.history import Origin
from gemmsmith.kernel import AnyKernel
from gemmsmith.launch import Launch
from gemmsmith.problem import Layout, Problem
from tuner.store import asked
from tuner.store.audit import LOCAL, Action, record
from tuner.store.codec import digest, from_json, to_json
from tuner.store.database import Database
from tuner.store.dictionary import Dictionary, Entry, Ids, problem_identity, problem_of
from tuner.store.gpus import Gpus, InUse
from tuner.store.models import CURRENT, DeviceRow, JobRow, ProblemRow, WinnerRow
from tuner.store.near import nearest
from tuner.trial import AgainstRival, OnSpread, Winner

PROMOTION_LOCK = 0x67656D77  # promotions queue up, so that revisions and sequences have no gaps

RANK = {Origin.REPLAYED: 0, Origin.IMPORTED: 1, Origin.MEASURED: 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Record:
    """What is carried along in JSON."""

    statistics: Statistics | None
    baseline: Statistics | None
    speedup: Ratio | None
    correctness: Correctness | None
    conditions: Conditions | None
    ties: tuple[str, ...]
    baseline_kernels: tuple[str, ...] = ()
    power_penalty: float | None = None
    regimes: tuple[InRegime, ...] = ()
    rivals: tuple[AgainstRival, ...] = ()
    spreads: tuple[OnSpread, ...] = ()


class Winners:
    """The table of winners."""

    def __init__(self, database: Database, dictionary: Dictionary, gpus: Gpus) -> None:
        self._database = database
        self._dictionary = dictionary
        self._gpus = gpus

    def promote(self, winner: Winner, *, imported: bool = False, force: bool = False) -> Winner:
        """Add a winner to the history, and make it current where the module's rule says so.

        An `imported` winner was measured by another installation; one that any revision of the
        history already shows is not added again. `force` makes it current whatever the origin of
        the current one; a pin still holds. Gives the winner as it is kept, with its revision.
        """
        origin = _origin(winner, imported=imported)
        fingerprint = _fingerprint(winner)
        with self._database.write() as session:
            self._database.lock(session, PROMOTION_LOCK)
            ids = self._dictionary.ids(session, _entries(winner))
            history = [*session.scalars(history_of(ids[winner.problem], ids[winner.device]))]
            current = next((row for row in history if row.is_current), None)
            known = history if imported else [current] if current else []
            row = next((row for row in known if row.digest == fingerprint), None)
            if row is None:
                row = _new_row(winner, ids, origin, fingerprint)
                row.revision = 1 + max((row.revision for row in history), default=0)
                session.add(row)
            elif winner.pack not in (None, row.pack):
                row.pack = winner.pack
                if row.is_current:
                    row.sequence = _next_sequence(session)
            outranks = current is None or force or RANK[origin] >= RANK[Origin(current.origin)]
            news = force or row not in history  # an import may be of something replaced long ago
            pinned = current is not None and current.pinned
            if row is not current and news and outranks and not pinned:
                make_current(session, row, current)
                if not imported:
                    _record_promotion(session, winner, row, current)
            session.flush()
            in_use = self._gpus.in_use(session)
            kept = replace(
                winner,
                revision=row.revision,
                promoted_at=row.promoted_at,
                pack=row.pack,
                stale=in_use.makes_stale(row, winner.environment),
                pinned=row.pinned,
            )
        self._dictionary.keep(ids)
        return kept

    def current(self, problem: Problem, device: str) -> Winner | None:
        """What is served for exactly this problem: one indexed read."""
        query = (
            _select()
            .where(CURRENT, DeviceRow.slug == device)
            .where(
                *(getattr(ProblemRow, name) == x for name, x in problem_identity(problem).items())
            )
        )
        with self._database.read() as session:
            return next(iter(self._found(session, session.execute(query).all())), None)

    def of(self, problems: Iterable[Problem], device: str) -> list[Winner]:
        """As `current`, for many problems at once, in no order; what has no winner is left out."""
        wanted = asked.ids(on_sqlite=self._database.is_sqlite)
        query = _select().where(CURRENT, DeviceRow.slug == device)
        query = query.where(WinnerRow.problem_id.in_(wanted))
        with self._database.read() as session:
            rows = session.execute(query, asked.parameters(problems)).all()
            return self._found(session, rows)

    def unknown(self, winners: Sequence[Winner]) -> list[Winner]:
        """Those of the winners that no revision of any history shows."""
        known = select(WinnerRow.digest).where(
            WinnerRow.problem_id.in_(asked.ids(on_sqlite=self._database.is_sqlite))
        )
        parameters = asked.parameters(winner.problem for winner in winners)
        with self._database.read() as session:
            digests = set(session.scalars(known, parameters))
        return [winner for winner in winners if _fingerprint(winner) not in digests]

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
        """Current winners in a fixed order (first tuned, first listed), `after` that problem's.

        `sizes` fixes some of m, n, k and batch.

        Raises:
            InvalidProblem: `after` is not in the database.
        """
        # A page is read along the index of current winners in its order. SQLite would gather and
        # sort all of the device's if it saw that an index has the device: so it does not.
        all_of_them = limit is None
        query = _select().where(WinnerRow.is_current if all_of_them else CURRENT)
        query = query.where(*(getattr(ProblemRow, name) == size for name, size in sizes.items()))
        if use is not None:
            query = query.where(WinnerRow.use == use.value)
        if min_speedup is not None:
            query = query.where(WinnerRow.speedup >= min_speedup)
        if device is not None:
            query = query.where((DeviceRow.slug if all_of_them else DeviceRow.slug + "") == device)
        if dtype is not None:
            query = query.where(ProblemRow.dtype == dtype)
        if layout is not None:
            query = query.where(ProblemRow.layout == layout.value)
        with self._database.read() as session:
            if after is not None:
                last = self._dictionary.problem_id(session, after)
                if last is None:
                    raise InvalidProblem("after", f"no page of winners ends with {after}")
                query = query.where(WinnerRow.problem_id > last)
            query = query.order_by(WinnerRow.problem_id, WinnerRow.device_id).limit(limit)
            return self._found(session, session.execute(query).all())

    def near(self, problem: Problem, device: str, limit: int, reach: float) -> list[Winner]:
        """Current winners of the same dtype, layout and batch, nearest first."""
        with self._database.read() as session:
            rows = nearest(session, _select(), problem, device, limit, reach)
            return self._found(session, rows)

    def sequence(self) -> int:
        """A number that grows whenever any answer changes; 0 while there is none."""
        with self._database.read() as session:
            return session.scalar(select(func.max(WinnerRow.sequence))) or 0

    def _found(self, session: Session, rows: Sequence[Row[WinnerRow, ProblemRow]]) -> list[Winner]:
        return self.read(session, [(row, problem_of(problem)) for row, problem in rows])

    def read(self, session: Session, rows: Sequence[tuple[WinnerRow, Problem]]) -> list[Winner]:
        """The winners that rows of the table describe."""
        kernels = self._dictionary.kernels(
            session, (row.kernel_id for row, _ in rows if row.kernel_id is not None)
        )
        in_use = self._gpus.in_use(session)
        return [self._winner(session, problem, row, kernels, in_use) for row, problem in rows]

    def _winner(
        self,
        session: Session,
        problem: Problem,
        row: WinnerRow,
        kernels: Mapping[int, AnyKernel],
        in_use: InUse,
    ) -> Winner:
        candidate = None
        if row.kernel_id is not None:
            launch = from_json(Launch, row.launch)
            candidate = Candidate(kernel=kernels[row.kernel_id], launch=launch)
        record = from_json(_Record, row.record)
        environment = self._dictionary.environment(session, row.environment_id)
        return Winner(
            problem=problem,
            device=self._dictionary.device(session, row.device_id),
            environment=environment,
            use=Use(row.use),
            candidate=candidate,
            statistics=record.statistics,
            baseline=record.baseline,
            speedup=record.speedup,
            correctness=record.correctness,
            conditions=record.conditions,
            ties=record.ties,
            baseline_kernels=record.baseline_kernels,
            power_penalty=record.power_penalty,
            regimes=record.regimes,
            rivals=record.rivals,
            spreads=record.spreads,
            replayed=row.replayed,
            pack=row.pack,
            revision=row.revision,
            promoted_at=row.promoted_at,
            job=row.job,
            stale=in_use.makes_stale(row, environment),
            pinned=row.pinned,
        )


def _select() -> Select[WinnerRow, ProblemRow]:
    return (
        select(WinnerRow, ProblemRow)
        .join(ProblemRow, ProblemRow.id == WinnerRow.problem_id)
        .join(DeviceRow, DeviceRow.id == WinnerRow.device_id)
    )


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
        session.flush()  # there must never be two, not even within the transaction
    row.is_current = True
    row.sequence = _next_sequence(session)


def _next_sequence(session: Session) -> int:
    return 1 + (session.scalar(select(func.max(WinnerRow.sequence))) or 0)


def _record_promotion(
    session: Session, winner: Winner, row: WinnerRow, before: WinnerRow | None
) -> None:
    owner = session.scalar(select(JobRow.owner).where(JobRow.public_id == winner.job))
    record(
        session,
        Action.PROMOTED,
        f"{winner.problem} on {winner.device.slug}",
        actor=owner or LOCAL,
        revision=row.revision,
        replaced=before.revision if before else None,
        job=winner.job,
    )


def _fingerprint(winner: Winner) -> str:
    """A hash of what was found, whenever and by whomever: equal ones are one revision."""
    found = to_json(replace(winner, revision=0, promoted_at="", pack=None, job=None))
    del found["stale"], found["pinned"]  # come and go
    # As it was before there were such fields.
    if not winner.baseline_kernels:
        del found["baseline_kernels"]
    penalty = found.pop("power_penalty")
    if penalty is not None:
        found["price"] = penalty
    for field in ("regimes", "rivals", "spreads"):
        if not found[field]:
            del found[field]
    return digest(found)


def _origin(winner: Winner, *, imported: bool) -> Origin:
    if winner.replayed:
        return Origin.REPLAYED
    return Origin.IMPORTED if imported else Origin.MEASURED


def _entries(winner: Winner) -> list[Entry]:
    entries: list[Entry] = [winner.problem, winner.device, winner.environment]
    return [*entries, winner.candidate.kernel] if winner.candidate else entries


def _new_row(winner: Winner, ids: Ids, origin: Origin, fingerprint: str) -> WinnerRow:
    candidate = winner.candidate
    return WinnerRow(
        problem_id=ids[winner.problem],
        device_id=ids[winner.device],
        environment_id=ids[winner.environment],
        kernel_id=ids[candidate.kernel] if candidate else None,
        launch=to_json(candidate.launch) if candidate else None,
        sequence=0,
        is_current=False,
        pinned=False,
        origin=origin.value,
        digest=fingerprint,
        use=winner.use.value,
        median_us=winner.statistics and winner.statistics.median_us,
        speedup=winner.speedup and winner.speedup.median,
        record=to_json(
            _Record(
                statistics=winner.statistics,
                baseline=winner.baseline,
                speedup=winner.speedup,
                correctness=winner.correctness,
                conditions=winner.conditions,
                ties=winner.ties,
                baseline_kernels=winner.baseline_kernels,
                power_penalty=winner.power_penalty,
                regimes=winner.regimes,
                rivals=winner.rivals,
                spreads=winner.spreads,
            )
        ),
        replayed=winner.replayed,
        pack=winner.pack,
        promoted_at=winner.promoted_at or datetime.now(UTC).isoformat(timespec="milliseconds"),
        job=winner.job,
    )
