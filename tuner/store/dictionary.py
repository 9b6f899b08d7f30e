"""Devices, environments, problems and kernels: rows that are written once and never change.

Writing one that exists already, in this or in another process, gives the existing row. Because
these rows stay as they are, what was read once is remembered for the life of the object.

One thing is repaired: a kernel's description that its backend would not give that name. Promoting
or importing a winner of the kernel puts the right one in its place (`heal`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from sqlalchemy import (
    ColumnElement,
    Integer,
    Select,
    String,
    and_,
    bindparam,
    cast,
    column,
    func,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Session, aliased

from gemmsmith.core.device import DeviceModel, Environment
from gemmsmith.core.kernel import AnyKernel, Kernel
from gemmsmith.core.problem import Layout, Problem
from tuner.store.codec import from_json, kernel_from_json, to_json
from tuner.store.database import Database
from tuner.store.models import DeviceRow, EnvironmentRow, KernelRow, ProblemRow
from tuner.store.sql import insert_ignore

Entry = DeviceModel | Environment | AnyKernel | Problem
T = TypeVar("T")

_MANY = 500
_ASKED = bindparam("asked", type_=String)
_IDENTITY = {"operation": String, "batch": Integer, "m": Integer, "n": Integer, "k": Integer}


class Dictionary:
    """Both directions of the dictionary tables, for one database. Threads may share it."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._ids: dict[object, int] = {}
        self._devices: dict[int, DeviceModel] = {}
        self._environments: dict[int, Environment] = {}
        self._kernels: dict[int, AnyKernel] = {}

    def ids(
        self, session: Session, entries: Iterable[Entry], *, as_given: bool = False
    ) -> dict[Entry, int]:
        """Ids of all entries, written where they are new. Call `keep` after the commit.

        With `as_given` new ones get their ids in that order.
        """
        ids = {entry: self._ids.get(_key(entry), 0) for entry in entries}  # no row has the id 0
        new = [entry for entry, row_id in ids.items() if row_id == 0]
        # One order for all: two transactions that write the same new rows never deadlock.
        for entry in new if as_given else sorted(new, key=_order):
            ids[entry] = _intern(session, entry)
        return ids

    def problem_id(self, session: Session, problem: Problem) -> int | None:
        identity = problem_identity(problem)
        return self._ids.get(_key(problem)) or session.scalar(
            _by_identity(ProblemRow, *identity), identity
        )

    def device_id(self, session: Session, slug: str) -> int | None:
        return self._ids.get(("device", slug)) or session.scalar(
            select(DeviceRow.id).where(DeviceRow.slug == slug)
        )

    def device(self, session: Session, row_id: int) -> DeviceModel:
        if row_id not in self._devices:
            self._devices[row_id] = device_of(session.get_one(DeviceRow, row_id))
        return self._devices[row_id]

    def environment(self, session: Session, row_id: int) -> Environment:
        if row_id not in self._environments:
            row = session.get_one(EnvironmentRow, row_id)
            self._environments[row_id] = from_json(Environment, row.description)
        return self._environments[row_id]

    def kernels(self, session: Session, row_ids: Iterable[int]) -> dict[int, AnyKernel]:
        """The kernels with those ids; those not read before are read in a few statements.

        A kernel whose description cannot be read is left out.
        """
        row_ids = set(row_ids)
        known = self._kernels
        missing = sorted(row_ids - known.keys())
        for some in pieces(missing):
            for row in session.scalars(select(KernelRow).where(KernelRow.id.in_(some))):
                if (kernel := _read(row.description)) is not None:
                    known[row.id] = kernel
        return {row_id: known[row_id] for row_id in row_ids if row_id in known}

    def described(self) -> list[tuple[str, AnyKernel | None]]:
        """Every kernel's name, and its description, None if that cannot be read."""
        with self._database.read() as session:
            return [
                (row.name, _read(row.description))
                for row in session.scalars(select(KernelRow).order_by(KernelRow.id))
            ]

    def misdescribed(self, session: Session, kernels: Iterable[AnyKernel]) -> dict[int, AnyKernel]:
        """The right descriptions, by row id, of kernels that are stored with a wrong one.

        A stored description is wrong if it differs and does not belong to the kernel's name.
        """
        described: dict[str, list[AnyKernel]] = {}
        for kernel in kernels:
            described.setdefault(kernel.name, []).append(kernel)
        names = sorted(described)
        corrected: dict[int, AnyKernel] = {}
        for some in pieces(names):
            for row in session.scalars(select(KernelRow).where(KernelRow.name.in_(some))):
                stored = _read(row.description)
                others = [kernel for kernel in described[row.name] if kernel != stored]
                if not others:  # the usual case
                    continue
                if stored is not None and stored.name == row.name and _means(stored):
                    continue
                if (right := next(filter(_means, others), None)) is not None:
                    corrected[row.id] = right
        return corrected

    def heal(self, session: Session, kernels: Iterable[AnyKernel]) -> list[int]:
        """Correct these kernels' stored descriptions; the ids of the corrected rows."""
        corrected = self.misdescribed(session, kernels)
        for row_id, kernel in corrected.items():
            values = {"description": to_json(kernel)}
            session.execute(update(KernelRow).where(KernelRow.id == row_id).values(values))
        if corrected:
            self.forget_kernels()
        return [*corrected]

    def forget_kernels(self) -> None:
        # A description may have been corrected.
        self._kernels = {}

    def keep(self, ids: Mapping[Entry, int]) -> None:
        # Called after the commit: what a failed transaction wrote has no id.
        self._ids.update({_key(entry): row_id for entry, row_id in ids.items()})


def problem_of(row: ProblemRow) -> Problem:
    return Problem(
        m=row.m, n=row.n, k=row.k, batch=row.batch, dtype=row.dtype, layout=Layout(row.layout)
    )


def device_of(row: DeviceRow) -> DeviceModel:
    return DeviceModel(
        name=row.name,
        arch=row.arch,
        sm_count=row.sm_count,
        memory_bytes=row.memory_bytes,
        l2_bytes=row.l2_bytes,
        max_clock_mhz=row.max_clock_mhz,
        memory_bandwidth=row.memory_bandwidth,
    )


def _key(entry: Entry) -> tuple[str, str | Environment | Problem]:
    match entry:
        case DeviceModel():
            return ("device", entry.slug)
        case Environment():
            return ("environment", entry)
        case Kernel():
            return ("kernel", entry.name)
        case Problem():
            return ("problem", entry)


def _order(entry: Entry) -> tuple[str, str]:
    kind, identity = _key(entry)
    return kind, entry.digest if isinstance(entry, Environment) else str(identity)


def _intern(session: Session, entry: Entry) -> int:
    match entry:
        case DeviceModel():
            fields = {name: getattr(entry, name) for name in entry.__slots__}
            return _upsert(session, DeviceRow, {"slug": entry.slug}, fields)
        case Environment():
            identity = {"digest": entry.digest}
            return _upsert(session, EnvironmentRow, identity, {"description": to_json(entry)})
        case Kernel():
            identity = {"name": entry.name}
            return _upsert(session, KernelRow, identity, {"description": to_json(entry)})
        case Problem():
            words = {"dtype": entry.dtype, "layout": entry.layout.value}
            logarithms = {f"lg_{axis}": math.log2(getattr(entry, axis)) for axis in "mnk"}
            return _upsert(session, ProblemRow, problem_identity(entry), words | logarithms)


def problem_identity(problem: Problem) -> dict[str, Any]:
    """The columns that say which problem it is."""
    return {
        "operation": problem.operation.key,
        "batch": problem.batch,
        "m": problem.m,
        "n": problem.n,
        "k": problem.k,
    }


def _read(stored: object) -> AnyKernel | None:
    try:
        return kernel_from_json(stored)
    except msgspec.ValidationError:
        return None


def _means(kernel: AnyKernel) -> bool:
    # False for an unknown backend.
    from tuner.claims import kernel_reason  # seldom needed, and slow to import

    return kernel_reason(kernel) is None


def _upsert(
    session: Session,
    table: type[DeviceRow] | type[EnvironmentRow] | type[KernelRow] | type[ProblemRow],
    identity: dict[str, Any],
    rest: dict[str, Any],
) -> int:
    query = _by_identity(table, *identity)
    row_id = session.scalar(query, identity)
    if row_id is None:
        row_id = insert_ignore(session, table, {**identity, **rest})
    if row_id is None:  # another process was quicker, and has committed by now
        row_id = session.scalars(query, identity).one()
    return row_id


@functools.cache  # to write such a query costs more than to run it
def _by_identity(
    table: type[DeviceRow] | type[EnvironmentRow] | type[KernelRow] | type[ProblemRow], *names: str
) -> Select[int]:
    return select(table.id).where(*(getattr(table, name) == bindparam(name) for name in names))


def pieces(items: Sequence[T]) -> Iterator[Sequence[T]]:
    # Databases limit the parameters of a statement.
    return (items[start : start + _MANY] for start in range(0, len(items), _MANY))


def asked(problems: Iterable[Problem]) -> dict[str, Any]:
    """The parameters of a query with `asked_ids`.

    The problems are one JSON parameter, so that the query's text never changes: written out as
    VALUES, thousands of parameters would cost more than the query itself.
    """
    return {_ASKED.key: msgspec.json.encode([*map(problem_identity, problems)]).decode()}


def asked_ids(*, on_sqlite: bool) -> Select[int]:
    """Ids of the problems of `asked` that are recorded."""
    # For `IN`: joined directly, SQLite would go through all winners, as it cannot know how few
    # problems there are.
    problem = aliased(ProblemRow)
    if on_sqlite:
        rows = func.json_each(_ASKED).table_valued("value", name="asked")
        cells: dict[str, ColumnElement[Any]] = {
            name: func.json_extract(rows.c.value, f"$.{name}") for name in _IDENTITY
        }
    else:
        typed: list[ColumnElement[Any]] = [column(name, kind) for name, kind in _IDENTITY.items()]
        table = func.jsonb_to_recordset(cast(_ASKED, JSONB)).table_valued(*typed, name="asked")
        rows = table.render_derived(with_types=True)
        cells = {name: rows.c[name] for name in _IDENTITY}
    same = (getattr(problem, name) == cell for name, cell in cells.items())
    return select(problem.id).join(rows, and_(*same))
