"""The audit: who changed what is served, or who may come in. Rows are only ever added.

A change and its entry are one transaction (`record`): neither exists without the other. The
exceptions are an import of many winners, which one entry follows, and denials, which are summed up
(`service.http.denials`).

The entries form a chain: each carries its own hash and that of the entry before. An entry that is
changed no longer has its hash; one that is removed, inserted or moved breaks the link of the next;
and the last one must be the one that `audit_head` names. An attacker who can write to the database
can compute the whole chain anew: against that, note the head's hash elsewhere now and then, and
check for it (`Audit.verify(known)`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec
from sqlalchemy import event, select
from sqlalchemy.orm import Session, aliased

from tuner.store.database import Database
from tuner.store.models import AuditHeadRow, AuditRow
from tuner.store.sql import equal, insert_ignore, moment

LOCAL = "local"
"""The actor of what is done on this machine without a key: on the command line, say."""

SYSTEM = "gemmsmith"
"""The actor of what the program does by itself, such as keeping the packs folder to its limit."""

UNKNOWN = "unknown"
"""The actor of a denied request whose key is missing or unknown."""

START = ""
"""What the first entry has as the hash of the one before."""

_LONGEST = {"actor": 200, "subject": 300}  # the columns' sizes
_WAITING = "gemmsmith_audit"


class Action(StrEnum):
    """What was done."""

    KEY_CREATED = "key-created"
    KEY_REVOKED = "key-revoked"
    PROMOTED = "promoted"  # a new winner is served, of a job or, for a whole file, of an import
    PINNED = "pinned"  # a revision is served until it is unpinned
    UNPINNED = "unpinned"
    ROLLED_BACK = "rolled-back"  # an older revision is served, and pinned
    PACK_REMOVED = "pack-removed"
    JOB_CANCELLED = "job-cancelled"
    DENIED = "denied"  # requests without a key or the right to make them, summed up


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditEntry:
    """One thing that was done.

    Attributes:
        at: seconds since the epoch, by the database's clock.
        actor: an API key's name, a worker, or `LOCAL`, `SYSTEM`, `UNKNOWN` or "import".
        subject: what it was done to: a key, a problem on a device, a job, a pack, a file; of
            denials the first request.
        detail: further figures, by action.
        previous, hash: of the entry before, and of this one.
        intact: this entry has its hash, and the one before it too; `Audit.verify` checks them all.
    """

    id: int
    at: float
    actor: str
    action: str
    subject: str
    detail: Mapping[str, Any]
    previous: str
    hash: str
    intact: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """The result of a check of the whole audit.

    Attributes:
        entries: how many were read.
        head: hash of the newest; empty if there are no entries.
        fault: the first thing that is wrong; None if all is well.
    """

    entries: int
    head: str
    fault: str | None


def record(session: Session, action: Action, subject: str, *, actor: str, **detail: Any) -> None:
    """Add an entry within the transaction that makes the change."""
    entry = AuditRow(
        at=moment(session),
        actor=actor[: _LONGEST["actor"]],
        action=action.value,
        subject=subject[: _LONGEST["subject"]],
        detail=detail,
    )
    session.info.setdefault(_WAITING, []).append(entry)


class Audit:
    """The table of entries."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, action: Action, subject: str, *, actor: str, **detail: Any) -> None:
        """Add an entry about what was done in several transactions."""
        with self._database.write() as session:
            record(session, action, subject, actor=actor, **detail)

    def entries(
        self,
        *,
        action: Action | None = None,
        actor: str | None = None,
        after: int | None = None,
        limit: int | None = 100,
    ) -> list[AuditEntry]:
        """Entries, newest first; `after` continues behind the entry with that id."""
        before = aliased(AuditRow)
        linked = (
            select(before.hash).where(before.id < AuditRow.id).order_by(before.id.desc()).limit(1)
        ).scalar_subquery()
        query = select(AuditRow, linked).order_by(AuditRow.id.desc()).limit(limit)
        query = query.where(*equal((AuditRow.action, action), (AuditRow.actor, actor)))
        if after is not None:
            query = query.where(AuditRow.id < after)
        with self._database.read() as session:
            return [
                AuditEntry(
                    id=row.id,
                    at=row.at,
                    actor=row.actor,
                    action=row.action,
                    subject=row.subject,
                    detail=row.detail,
                    previous=row.previous,
                    hash=row.hash,
                    intact=row.hash == _digest(row)
                    and row.previous == (START if hash_before is None else hash_before),
                )
                for row, hash_before in session.execute(query)
            ]

    def verify(self, known: str | None = None) -> Chain:
        """Check every link; the entry with the hash `known`, noted earlier, must still exist.

        Entries that are added meanwhile do no harm: the head is read first, and must be among
        those that are checked.
        """
        with self._database.read() as session:
            head = session.execute(select(AuditHeadRow.hash)).scalar()
            missing = {"the newest entry": head, "the entry that was noted": known}
            previous, last, count = START, None, 0
            query = select(AuditRow).order_by(AuditRow.id).execution_options(yield_per=500)
            with closing(session.execute(query)) as result:
                for row in result.scalars():
                    if row.hash != _digest(row):
                        fault = f"entry {row.id} was changed"
                        return Chain(entries=count, head=previous, fault=fault)
                    if row.previous != previous:
                        after = "the beginning" if last is None else f"entry {last}"
                        fault = (
                            f"between {after} and entry {row.id}, entries were removed or put in"
                        )
                        return Chain(entries=count, head=previous, fault=fault)
                    missing = {name: hash_ for name, hash_ in missing.items() if hash_ != row.hash}
                    previous, last, count = row.hash, row.id, count + 1
                    session.expunge(row)
        if head is None and count:
            fault = "nothing says which entry is the newest"
            return Chain(entries=count, head=previous, fault=fault)
        faults = (
            f"{name} ({hash_}) is missing" for name, hash_ in missing.items() if hash_ is not None
        )
        return Chain(entries=count, head=previous, fault=next(faults, None))


def _digest(row: AuditRow) -> str:
    """SHA-256 of an entry and of the hash before it, over one text on every database."""
    # Migration 0006 has a copy, which must stay as it is.
    detail = msgspec.to_builtins(row.detail)
    content = [row.previous, row.at, row.actor, row.action, row.subject, detail]
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@event.listens_for(Session, "before_commit")
def _link(session: Session) -> None:
    waiting: list[AuditRow] = session.info.pop(_WAITING, [])
    if not waiting:
        return
    # Entries wait in the session until its transaction is about to commit. Only then the head is
    # locked, as the last lock of all, so that two writers neither take the same place nor wait for
    # each other.
    insert_ignore(session, AuditHeadRow, {"id": 1, "entries": 0, "hash": START})
    head = session.scalars(select(AuditHeadRow).with_for_update()).one()
    for row in waiting:
        row.previous = head.hash
        row.hash = head.hash = _digest(row)
        head.entries += 1
        session.add(row)
        session.flush()  # one by one: their ids are in the order of the chain
