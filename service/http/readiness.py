"""Whether the service can do its work, as `/readyz` says: checked once for all callers.

However many callers there are, the database is read at most once a second, and a write is tried at
most every ten seconds, so that orders do not wait for it. A failed write, or a request that could
not use the database, lets the next check write at once. One thread does all checks, and a check
that takes long is itself an answer.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import structlog

from tuner import store
from tuner.errors import DatabaseBusy, StoreError
from tuner.store.schema import probe

FRESH_S = 1.0
"""How long the report of a check is given to callers."""

WRITE_EVERY_S = 10.0
"""Time between two writes while all is well. One costs what an order does, an fsync."""

PATIENCE_S = 3.0
"""A caller's, for a check under way; a check that waits for other writers takes 2 s."""

PACKS_NEED_BYTES = 100_000_000
"""Free space below which the packs' disk counts as full: a few tuned problems' packs."""

OK = "ok"
_UNUSABLE = (
    "cannot be used; the service's log says why, and so does this answer to a request with a key"
)

log = structlog.get_logger("gemmsmith.service")


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of a check.

    Attributes:
        status: `ok`; `degraded`, and ready; or the kind of problem that makes it unready.
        detail: what is wrong where it is not ready.
        checks: how each check went.
        schema: the database's revision.
    """

    status: str
    detail: str
    checks: Mapping[str, str]
    schema: str | None

    @property
    def is_ready(self) -> bool:
        return self.status in (OK, "degraded")

    def for_strangers(self) -> Report:
        """The same without what a database says: it names files, hosts and users."""
        if self.status != "store-unavailable":
            return self
        checks = {**self.checks, "database": _UNUSABLE}
        return Report(status=self.status, detail=f"It {_UNUSABLE}.", checks=checks, schema=None)


class Readiness:
    """Looks at the database at `url` and at the packs folder on request; to be closed."""

    def __init__(self, url: str, packs: Path) -> None:
        self._url = url
        self._packs = packs
        self._expected = store.head()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="readiness")
        self._looking: Future[Report] | None = None
        self._begun_at = self._written_at = -float("inf")
        self._doubted = True
        self._said = ""

    def doubt(self) -> None:
        """A request could not use the database: see for yourself."""
        self._doubted = True

    async def report(self) -> Report:
        """The last look's report if that is fresh, else a new one's."""
        if self._looking is None or (
            self._looking.done() and time.monotonic() - self._begun_at >= FRESH_S
        ):
            self._begun_at = time.monotonic()
            self._looking = self._pool.submit(self._look)
        looking = self._looking
        if not looking.done():
            await asyncio.wait([asyncio.wrap_future(looking)], timeout=PATIENCE_S)
        if looking.done():
            return looking.result()
        said = f"has not answered for {time.monotonic() - self._begun_at:.0f} s"
        return _unusable(f"The database {said}.", {"database": said})

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _look(self) -> Report:
        checks: dict[str, str] = {}
        schema = None
        try:
            schema = store.current(self._url, patience_s=PATIENCE_S)
            checks["database"] = OK
            if schema != self._expected:
                return self._outdated(schema)
            checks |= {"schema": OK, "packs": _room_for_packs(self._packs)}
            self._write_if_due()
        except DatabaseBusy:
            checks["database"] = "busy: another process has held the write lock for seconds"
        except StoreError as error:
            self._say(str(error))
            return _unusable(str(error), {**checks, "database": str(error)})
        self._say("")
        status = OK if set(checks.values()) == {OK} else "degraded"
        return Report(status=status, detail="", checks=checks, schema=schema)

    def _outdated(self, current: str | None) -> Report:
        detail = (
            f"The database is at {current}, this version needs {self._expected}: run "
            "`gemmsmith db upgrade`, or upgrade gemmsmith if the database is newer."
        )
        checks = {"database": OK, "schema": detail}
        return Report(status="schema-mismatch", detail=detail, checks=checks, schema=current)

    def _write_if_due(self) -> None:
        if not self._doubted and time.monotonic() - self._written_at < WRITE_EVERY_S:
            return
        self._doubted = False  # first: a doubt that comes meanwhile counts
        try:
            probe(self._url)
        except StoreError:
            self._doubted = True
            raise
        self._written_at = time.monotonic()

    def _say(self, error: str) -> None:
        if error and error != self._said:
            log.warning("not ready", error=error)
        self._said = error


def _unusable(detail: str, checks: Mapping[str, str]) -> Report:
    return Report(status="store-unavailable", detail=detail, checks=checks, schema=None)


def _room_for_packs(folder: Path) -> str:
    if not folder.is_dir():
        return "the packs folder is missing: packs can be neither served nor compiled"
    if not os.access(folder, os.W_OK):
        return "the packs folder cannot be written: no pack can be compiled"
    free = shutil.disk_usage(folder).free
    if free < PACKS_NEED_BYTES:
        return f"{free / 1e6:.0f} MB are left for packs, less than {PACKS_NEED_BYTES / 1e6:.0f}"
    return OK
