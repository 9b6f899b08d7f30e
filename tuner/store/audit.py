"""The audit: who changed what is served, or who may come in. Rows are only ever added.

A change and its entry are one transaction (`record`), so that there is neither without the other.
The exceptions are an import of many winners, which one entry follows, and denials, which are summed
up (`service.http.denials`). The entries form a chain (`tuner.store.chain`): one that is changed or
removed shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session, aliased

from tuner.store import chain
from tuner.store.clock import moment
from tuner.store.database import Database
from tuner.store.models import AuditRow

LOCAL = "local"
"""The actor of what is done on this machine without a key: on the command line, say."""

SYSTEM = "gemmsmith"
"""The actor of what the program does by itself, such as keeping the packs folder to its limit."""

UNKNOWN = "unknown"
"""The actor of what was denied to somebody without a key that is known."""

_LONGEST = {"actor": 200, "subject": 300}  # the columns' sizes


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
        detail: what else there is to know, by action.
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


def record(session: Session, action: Action, subject: str, *, actor: str, **detail: Any) -> None:
    """Add an entry within the transaction that makes the change."""
    chain.append(
        session,
        AuditRow(
            at=moment(session),
            actor=actor[: _LONGEST["actor"]],
            action=action.value,
            subject=subject[: _LONGEST["subject"]],
            detail=detail,
        ),
    )


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
        if action is not None:
            query = query.where(AuditRow.action == action.value)
        if actor is not None:
            query = query.where(AuditRow.actor == actor)
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
                    intact=row.hash == chain.digest(row)
                    and row.previous == (chain.START if hash_before is None else hash_before),
                )
                for row, hash_before in session.execute(query)
            ]

    def verify(self, known: str | None = None) -> chain.Chain:
        """Check every entry, and that the one with the hash `known` is still among them."""
        with self._database.read() as session:
            return chain.verify(session, known)
