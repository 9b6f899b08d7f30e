"""The audit: who changed what is served, or who may come in. Rows are only ever added.

A change and its entry are one transaction (`record`), so that there is neither without the other.
The exception is an import of many winners: each is a transaction, and one entry follows them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from tuner.store.clock import moment
from tuner.store.database import Database
from tuner.store.models import AuditRow

LOCAL = "local"
"""The actor of what is done on this machine without a key: on the command line, say."""

SYSTEM = "gemmsmith"
"""The actor of what the program does by itself, such as keeping the packs folder to its limit."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditEntry:
    """One thing that was done.

    Attributes:
        at: seconds since the epoch, by the database's clock.
        actor: an API key's name, a worker, or `LOCAL`, `SYSTEM` or "import".
        subject: what it was done to: a key, a problem on a device, a job, a pack, a file.
        detail: what else there is to know, by action.
    """

    id: int
    at: float
    actor: str
    action: str
    subject: str
    detail: Mapping[str, Any]


def record(session: Session, action: Action, subject: str, *, actor: str, **detail: Any) -> None:
    """Add an entry within the transaction that makes the change."""
    session.add(
        AuditRow(
            at=moment(session),
            actor=actor[: _LONGEST["actor"]],
            action=action.value,
            subject=subject[: _LONGEST["subject"]],
            detail=detail,
        )
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
        query = select(AuditRow).order_by(AuditRow.id.desc()).limit(limit)
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
                )
                for row in session.scalars(query)
            ]
