"""Requests that were denied, 401 or 403, as entries of the audit that no attacker can multiply.

The first denial is written at once, what follows is summed up: by who, from where and how, for a
minute, then for twice as long again and again, up to an hour, while denials go on. Of a span at
most 20 sums are kept apart. However many requests there are, that is less than 2,000 entries and a
megabyte a day.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass

import structlog
from starlette.types import Scope

from service.documents import timestamp
from service.errors import ProblemError
from service.http.access import Scope as Right
from tuner.errors import StoreError
from tuner.store.audit import UNKNOWN, Action, Audit

SHORTEST_S = 60.0
_LONGEST_S = 3600.0
_KEPT_APART = 20
_PATIENCE_S = 2.0  # of the end of the service, for a database that does not answer

log = structlog.get_logger("gemmsmith.access")

Kind = tuple[str, str, int]
"""Who was denied something, the address it came from, and the status."""

_OTHERS: Kind = (UNKNOWN, "others", 0)


@dataclass(kw_only=True, slots=True)
class _Sum:
    """Denials of a kind: the first one's request, how many, and when."""

    first: str
    since: float
    until: float
    times: int = 0


class Denials:
    """Sums denials up and writes the sums. A context manager: it writes while it is open."""

    def __init__(self, audit: Audit, shortest_s: float = SHORTEST_S) -> None:
        self._audit = audit
        self._shortest_s = shortest_s
        self._sums: dict[Kind, _Sum] = {}
        self._adding = threading.Lock()
        self._news = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="denials", daemon=True)

    def __enter__(self) -> Denials:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._news.set()
        self._thread.join(_PATIENCE_S)

    def note_answer(self, scope: Scope, status: int) -> None:
        """Note a denial, 401 or 403, of the request of that ASGI scope."""
        actor = UNKNOWN
        if status == 403:  # a key that is known, or no key where none is asked for
            with contextlib.suppress(ProblemError):
                actor = scope["app"].state.service.access.admit(scope, Right.READ).name
        address = (scope.get("client") or ("",))[0]
        # The route's template, not the path: what a stranger writes is not kept.
        route = getattr(scope.get("route"), "path", "another path")
        self.note((actor, address, status), f"{scope['method'][:10]} {route}")

    def note(self, kind: Kind, request: str) -> None:
        """One more denial. Takes a microsecond, and no database."""
        at = time.time()
        with self._adding:
            if kind not in self._sums and len(self._sums) >= _KEPT_APART - 1:
                kind = _OTHERS
            denied = self._sums.setdefault(kind, _Sum(first=request, since=at, until=at))
            denied.times += 1
            denied.until = at
        self._news.set()

    def _work(self) -> None:
        pause_s = self._shortest_s
        while not self._stopping.is_set():
            self._news.wait()
            self._news.clear()
            self._write()
            self._stopping.wait(pause_s)
            went_on = self._news.is_set()
            pause_s = min(2 * pause_s, _LONGEST_S) if went_on else self._shortest_s
        self._write()

    def _write(self) -> None:
        with self._adding:
            taken, self._sums = self._sums, {}
        for (actor, address, status), denied in taken.items():
            try:
                self._audit.add(
                    Action.DENIED,
                    denied.first,
                    actor=actor,
                    status=status or None,
                    address=address,
                    times=denied.times,
                    since=timestamp(denied.since),
                    until=timestamp(denied.until),
                )
            except StoreError as error:
                log.warning("denials not in the audit", times=denied.times, error=str(error))
