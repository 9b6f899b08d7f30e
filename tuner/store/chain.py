"""The audit's chain: each entry carries its own hash and that of the entry before.

An entry that is changed no longer has its hash; one that is removed, put in or moved breaks the
link of the next; and the last one must be the one that `audit_head` names. Whoever may write to the
database could make all of it anew: against that, note the head's hash elsewhere now and then, and
ask for it (`verify(known)`).

Entries wait in the session until its transaction is about to commit. Only then the head is locked,
as the last lock of all, so that two writers neither take the same place nor wait for each other.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import closing
from dataclasses import dataclass

import msgspec
from sqlalchemy import event, select
from sqlalchemy.orm import Session

from tuner.store.models import AuditHeadRow, AuditRow
from tuner.store.upsert import insert_ignore

START = ""
"""What the first entry has as the hash of the one before."""

_WAITING = "gemmsmith_audit"


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """What a check of the whole audit found.

    Attributes:
        entries: how many were read.
        head: hash of the newest; empty where there are none.
        fault: what is wrong first; None where nothing is.
    """

    entries: int
    head: str
    fault: str | None


def digest(row: AuditRow) -> str:
    """SHA-256 of an entry and of the hash before it, over one text on every database.

    Migration 0006 has a copy, which must stay as it is.
    """
    detail = msgspec.to_builtins(row.detail)
    content = [row.previous, row.at, row.actor, row.action, row.subject, detail]
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def append(session: Session, row: AuditRow) -> None:
    """Add an entry when the session's transaction commits."""
    session.info.setdefault(_WAITING, []).append(row)


@event.listens_for(Session, "before_commit")
def _link(session: Session) -> None:
    waiting: list[AuditRow] = session.info.pop(_WAITING, [])
    if not waiting:
        return
    insert_ignore(session, AuditHeadRow, {"id": 1, "entries": 0, "hash": START})
    head = session.scalars(select(AuditHeadRow).with_for_update()).one()
    for row in waiting:
        row.previous = head.hash
        row.hash = head.hash = digest(row)
        head.entries += 1
        session.add(row)
        session.flush()  # one by one: their ids are in the order of the chain


def verify(session: Session, known: str | None = None) -> Chain:
    """Read the whole audit and check every link; `known` is a head that was noted earlier.

    Entries that are added meanwhile do no harm: the head is read first, and must be among them.
    """
    head = session.execute(select(AuditHeadRow.hash)).scalar()
    wanted = {"the newest entry": head, "the entry that was noted": known}
    previous, last, count = START, None, 0
    query = select(AuditRow).order_by(AuditRow.id).execution_options(yield_per=500)
    with closing(session.execute(query)) as found:
        for row in found.scalars():
            if row.hash != digest(row):
                return Chain(entries=count, head=previous, fault=f"entry {row.id} was changed")
            if row.previous != previous:
                after = "the beginning" if last is None else f"entry {last}"
                fault = f"between {after} and entry {row.id}, entries were removed or put in"
                return Chain(entries=count, head=previous, fault=fault)
            wanted = {name: hash_ for name, hash_ in wanted.items() if hash_ != row.hash}
            previous, last, count = row.hash, row.id, count + 1
            session.expunge(row)
    if head is None and count:
        fault = "nothing says which entry is the newest"
        return Chain(entries=count, head=previous, fault=fault)
    missing = (
        f"{name} ({hash_}) is missing" for name, hash_ in wanted.items() if hash_ is not None
    )
    return Chain(entries=count, head=previous, fault=next(missing, None))
