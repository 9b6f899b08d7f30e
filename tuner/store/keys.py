"""API keys: made, listed, revoked, and looked up by the service. A key itself is never stored.

A key is `gsk_` and 32 random bytes; only its SHA-256 is stored.

A name is used once. Revoked and expired keys stay listed.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from sqlalchemy import ColumnElement, and_, or_, select, update

from tuner.errors import KeyNameTaken, KeyNotFound
from tuner.store.audit import LOCAL, SYSTEM, UNKNOWN, Action, record
from tuner.store.database import Database
from tuner.store.models import ApiKeyRow
from tuner.store.sql import moment, now

PREFIX = "gsk_"
LONGEST_LIFE_S = 10 * 366 * 86_400
MOST_JOBS = 1_000_000

NAME_RULE = (
    "1 … 100 of A-Z a-z 0-9 . _ @ -, a letter or digit first; not local, import, gemmsmith, unknown"
)
NAME_PATTERN = "[A-Za-z0-9][A-Za-z0-9._@-]{0,99}"
_RESERVED = frozenset({LOCAL, SYSTEM, UNKNOWN, "import"})  # they mean something else in the audit

_SHOWN = len(PREFIX) + 6
_KEYS_LOCK = 0x67656D6B  # creations queue up, so that two at once cannot take one name


class Scope(StrEnum):
    """What a key allows; each includes those before it."""

    READ = "read"  # look up, watch, export
    TUNE = "tune"  # order, cancel and retry tuning jobs
    ADMIN = "admin"  # pin and roll back winners, manage keys, read the audit

    @property
    def included(self) -> frozenset[Scope]:
        ordered = list(Scope)
        return frozenset(ordered[: ordered.index(self) + 1])


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiKey:
    """A key without its secret. Times are seconds since the epoch by the database's clock.

    Attributes:
        prefix: its first characters, by which people tell keys apart.
        scope: the widest that it allows.
        job_limit: jobs that it may have waiting or running; None for the service's default.
        expires_at, revoked_at: when it stopped or stops working; None if it does not.
        last_used_at: to the minute.
    """

    id: int
    name: str
    prefix: str
    scope: Scope
    job_limit: int | None
    created_at: float
    expires_at: float | None
    last_used_at: float | None
    revoked_at: float | None


def is_name(name: str) -> bool:
    return bool(re.fullmatch(NAME_PATTERN, name, re.ASCII)) and name not in _RESERVED


def digest(secret: bytes) -> str:
    # A slow password hash would add nothing: it makes guessing costly, but 256 random bits cannot
    # be guessed.
    return hashlib.sha256(secret).hexdigest()


class Keys:
    """The table of keys."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(
        self,
        name: str,
        scope: Scope,
        *,
        expires_in_s: float | None = None,
        job_limit: int | None = None,
        actor: str = LOCAL,
    ) -> tuple[ApiKey, str]:
        """Make a key; the key as it is listed, and its secret, which is not stored.

        Raises:
            KeyNameTaken: a key has this name, or had it.
        """
        secret = PREFIX + secrets.token_urlsafe(32)
        with self._database.write() as session:
            self._database.lock(session, _KEYS_LOCK)
            # Jobs, Idempotency-Keys and the audit name the key that they belong to: a later key of
            # the same name would own them.
            if session.scalar(select(ApiKeyRow.id).where(ApiKeyRow.name == name).limit(1)):
                raise KeyNameTaken(
                    f"a key is or was named {name!r}, and names are not used again; choose another "
                    "name"
                )
            at = moment(session)
            row = ApiKeyRow(
                name=name,
                key_hash=digest(secret.encode()),
                prefix=secret[:_SHOWN],
                scopes=scope.value,
                job_limit=job_limit,
                created_at=at,
                expires_at=None if expires_in_s is None else at + expires_in_s,
            )
            session.add(row)
            session.flush()
            record(session, Action.KEY_CREATED, name, actor=actor, prefix=row.prefix, scope=scope)
            return _key_of(row), secret

    def revoke(self, name: str, *, actor: str = LOCAL) -> ApiKey:
        """End the active key of that name, for good.

        Raises:
            KeyNotFound: no active key has this name.
        """
        with self._database.write() as session:
            query = select(ApiKeyRow).where(_is_active(), ApiKeyRow.name == name)
            row = session.scalars(query.with_for_update()).one_or_none()
            if row is None:
                raise KeyNotFound(f"there is no active key named {name!r}")
            row.revoked_at = moment(session)
            record(session, Action.KEY_REVOKED, name, actor=actor, prefix=row.prefix)
            return _key_of(row)

    def list(
        self, *, inactive: bool = False, after: int | None = None, limit: int | None = None
    ) -> list[ApiKey]:
        """Active keys, newest first, with `inactive` also those revoked or expired.

        `after` continues behind the key with that id.
        """
        query = select(ApiKeyRow).order_by(ApiKeyRow.id.desc()).limit(limit)
        if not inactive:
            query = query.where(_is_active())
        if after is not None:
            query = query.where(ApiKeyRow.id < after)
        with self._database.read() as session:
            return [_key_of(row) for row in session.scalars(query)]

    def active(self) -> tuple[dict[str, ApiKey], float]:
        with self._database.read() as session:
            rows = session.scalars(select(ApiKeyRow).where(_is_active()))
            return {row.key_hash: _key_of(row) for row in rows}, moment(session)

    def used(self, ids: Collection[int]) -> None:
        """Note that the keys with these ids are in use."""
        with self._database.write() as session:
            session.execute(
                update(ApiKeyRow).where(ApiKeyRow.id.in_(ids)).values(last_used_at=now())
            )


def _is_active() -> ColumnElement[bool]:
    lasts = or_(ApiKeyRow.expires_at.is_(None), ApiKeyRow.expires_at > now())
    return and_(ApiKeyRow.revoked_at.is_(None), lasts)


def _key_of(row: ApiKeyRow) -> ApiKey:
    return ApiKey(
        id=row.id,
        name=row.name,
        prefix=row.prefix,
        scope=Scope(row.scopes),
        job_limit=row.job_limit,
        created_at=row.created_at,
        expires_at=row.expires_at,
        last_used_at=row.last_used_at,
        revoked_at=row.revoked_at,
    )
