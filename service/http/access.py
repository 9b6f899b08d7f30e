"""Who may do what: bearer keys with scopes, asked for by every route.

A route names its scope with `dependencies=[needs(Scope.TUNE)]` or takes the caller itself as a
parameter, `caller: Annotated[Caller, needs(Scope.ADMIN)]`; routes of lookups need `Scope.READ`
(`service.http.lookup_routes`). `tests/unit/service/test_access.py` holds that no route is without
one, but for those that anyone may see.

A request is judged in memory. The keys are read again every second, so one that was revoked or has
expired stops working within two; while the database does not answer, those known last stay valid
until they expire. Without keys the service answers only this machine, and only under a loopback
name: a web page whose name is made to mean 127.0.0.1 (DNS rebinding) gets nothing.
"""

from __future__ import annotations

import functools
import ipaddress
import itertools
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import quote

import anyio
import structlog
from fastapi import Depends, HTTPException, Request
from fastapi.security import HTTPBearer

from service.errors import ProblemError
from service.http.attempts import Attempts
from tuner.store.keys import Keys, digest
from tuner.store.keys import Scope as Scope

COOKIE = "gemmsmith_key"
"""The cookie that a browser brings its key in."""

LOGIN = "/ui/login"
LOGOUT = "/ui/logout"

RELOAD_S = 1.0
_SHORTEST_S = 0.1  # between two readings, however many unknown keys are tried
_PATIENCE_S = 1.0  # of a request with an unknown key, which may have been made this moment
_NOTED_EVERY_S = 60.0

_COOKIE = COOKIE.encode()
_LOOPBACK = re.compile(rb"(localhost|127(\.[0-9]{1,3}){3}|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)

log = structlog.get_logger("gemmsmith.access")


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """Who asks.

    Attributes:
        name: the API key's name; "local" where keys are not asked for.
        job_limit: jobs it may have waiting or running at once; None: no limit.
    """

    name: str
    scopes: frozenset[Scope]
    job_limit: int | None = None


LOCAL = Caller(name="local", scopes=frozenset(Scope))
"""The caller if keys are not required: any program on this machine."""


def client_of(address: str) -> str:
    """Whom an IP address stands for: of IPv6 its /64, which one client has all of."""
    try:
        known = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(known, ipaddress.IPv4Address):
        return address
    return str(known.ipv4_mapped or ipaddress.ip_network((known, 64), strict=False))


def client_name(connection: Mapping[str, Any]) -> str:
    """Whom a request, an ASGI connection scope, comes from; empty where that is not known."""
    client = connection.get("client")
    return client_of(client[0]) if client else ""


def whose(caller: Caller, connection: Mapping[str, Any]) -> str:
    """What a request, an ASGI connection scope, is counted under: the key, or else the address."""
    return client_name(connection) if caller is LOCAL else f"key {caller.name}"


class UnknownKey(ProblemError):
    """A key that is not among those known; it may have been made since they were read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Held:
    """A key that works until that time on `time.monotonic()`'s clock."""

    id: int
    caller: Caller
    until: float


class Doorkeeper:
    """Identifies the caller and checks its rights. A context manager: it reads the keys while open.

    Args:
        required: whether a request must bring a key.
        job_limit: of keys that say nothing else.
    """

    def __init__(self, keys: Keys, *, required: bool, job_limit: int) -> None:
        self.required = required
        self._keys = keys
        self._job_limit = job_limit
        self._held: Mapping[str, _Held] = {}
        self._used: set[int] = set()
        self._noted: dict[int, float] = {}
        self._attempts = Attempts()
        self._reading = threading.Lock()
        self._begun = itertools.count(1)
        self._last_begun = self._last_done = 0
        self._wanted = threading.Event()
        self._stopping = threading.Event()
        # Two, because a write waits for other writers and a reading must not.
        self._threads = [
            threading.Thread(target=self._every_second, args=(work,), name=name, daemon=True)
            for name, work in (("keys", self._read_again), ("keys-used", self._note_used))
        ]

    def __enter__(self) -> Doorkeeper:
        """Read the keys, and keep them current.

        Raises:
            StoreError: they cannot be read.
        """
        if self.required:
            self.reload()
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._wanted.set()
        if self.required:
            for thread in self._threads:
                thread.join(_PATIENCE_S)

    def admit(self, connection: Mapping[str, Any], needed: Scope) -> Caller:
        """Who makes this request, an ASGI connection scope. Takes a few microseconds.

        Raises:
            UnknownKey: 401; a moment later the key may be known, so leave the answer to `needs`.
            ProblemError: 401 without a key, 403 without the scope, 421 under a foreign name.
        """
        if not self.required:
            _check_name(connection["headers"])
            return LOCAL
        secret = _secret(connection["headers"])
        if secret is None:
            raise _unauthorized(ProblemError, "This needs an API key, and none was sent.")
        held = self._held.get(digest(secret))
        if held is None or time.monotonic() >= held.until:
            raise _unauthorized(
                UnknownKey, "This API key is unknown: mistyped, revoked or expired."
            )
        self._used.add(held.id)
        if needed not in held.caller.scopes:
            raise _forbidden(held.caller, needed)
        return held.caller

    def admits(self, connection: Mapping[str, Any], needed: Scope) -> bool:
        """Whether `admit` does."""
        try:
            self.admit(connection, needed)
        except ProblemError:
            return False
        return True

    def reload(self) -> None:
        """Read the keys now: what this process has created or revoked counts at once.

        Raises:
            StoreError: they cannot be read; those known stay.
        """
        with self._reading:
            self._last_begun = begun = next(self._begun)
            active, at = self._keys.active()
            read = time.monotonic()
            self._held = {
                hashed: _Held(
                    id=key.id,
                    caller=Caller(
                        name=key.name,
                        scopes=key.scope.included,
                        job_limit=self._job_limit if key.job_limit is None else key.job_limit,
                    ),
                    until=math.inf if key.expires_at is None else read + key.expires_at - at,
                )
                for hashed, key in active.items()
            }
            self._last_done = begun

    async def welcome(self, connection: Mapping[str, Any], needed: Scope) -> Caller:
        """As `admit`, but a key made this moment is known.

        Raises:
            ProblemError: as `admit`; 429 where many unknown keys come from one address.
        """
        try:
            return self.admit(connection, needed)
        except UnknownKey:
            client = client_name(connection)
            self._attempts.begin(client)
        await self._look_again()
        try:
            caller = self.admit(connection, needed)
        except UnknownKey:
            log.warning("unknown key", client=client)
            raise
        self._attempts.succeeded(client)
        return caller

    async def _look_again(self) -> None:
        """Wait until the keys have been read anew, a moment at most.

        However many wait and whatever they bring, the database is read at most ten times a second.
        """
        needed = self._last_begun + 1
        self._wanted.set()
        with anyio.move_on_after(_PATIENCE_S):
            while self._last_done < needed:
                await anyio.sleep(0.01)

    def _every_second(self, work: Callable[[], None]) -> None:
        healthy = True
        while not self._stopping.is_set():
            try:
                work()
            # Were this thread to end, a revoked key would stay valid for ever.
            except Exception as error:  # noqa: BLE001
                if healthy:
                    log.warning("keys cannot be kept current", error=repr(error))
                healthy = False
            else:
                healthy = True

    def _read_again(self) -> None:
        self._stopping.wait(_SHORTEST_S)
        self._wanted.wait(RELOAD_S - _SHORTEST_S)
        self._wanted.clear()
        self.reload()

    def _note_used(self) -> None:
        self._stopping.wait(RELOAD_S)
        used, self._used = self._used, set()
        now = time.monotonic()
        due = [key for key in used if now - self._noted.get(key, -math.inf) >= _NOTED_EVERY_S]
        if due:
            self._noted |= dict.fromkeys(due, now)
            self._keys.used(due)


BEARER = HTTPBearer(
    auto_error=False,
    description="An API key, `gsk_…`. "
    "Not required if the service listens on the loopback interface only.",
)
"""For the OpenAPI description; the `Doorkeeper` reads the header."""


async def admitted(request: Request, needed: Scope) -> Caller:
    """Who makes the request.

    Raises:
        ProblemError: 401 or 403, the scope is missing.
        HTTPException: 303 to the login page, for a browser that brings no key.
    """
    door: Doorkeeper = request.app.state.service.access
    try:
        caller = await door.welcome(request.scope, needed)
    except ProblemError as error:
        if error.status == 401 and _is_page(request):
            here = request.url.path + (f"?{request.url.query}" if request.url.query else "")
            location = f"{LOGIN}?next={quote(here, safe='/')}"
            raise HTTPException(303, headers={"Location": location}) from None
        raise
    if caller is not LOCAL:
        structlog.contextvars.bind_contextvars(key=caller.name)
    return caller


@functools.cache
def needs(scope: Scope) -> Any:
    """A dependency that gives the `Caller`, or answers as `admitted` raises."""

    async def caller(request: Request, _: Annotated[object, Depends(BEARER)]) -> Caller:
        return await admitted(request, scope)

    caller.scope = scope  # type: ignore[attr-defined]
    return Depends(caller)


def _is_page(request: Request) -> bool:
    return request.method == "GET" and "text/html" in request.headers.get("accept", "")


def _secret(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The key that a request brings, as a bearer token or else in the cookie; None without."""
    cookie = None
    for name, value in headers:
        if name == b"authorization":
            scheme, _, secret = value.partition(b" ")
            return secret.strip() if scheme.lower() == b"bearer" else None
        if name == b"cookie":
            for part in value.split(b";"):
                key, _, content = part.strip().partition(b"=")
                if key == _COOKIE:
                    cookie = content
    return cookie or None


def _check_name(headers: Iterable[tuple[bytes, bytes]]) -> None:
    names = [value for name, value in headers if name == b"host"]
    if len(names) == 1 and _LOOPBACK.fullmatch(names[0]):
        return
    raise ProblemError(
        status=421,
        kind="misdirected-request",
        detail="Without API keys this service answers under the names localhost, 127.0.0.1 and "
        "[::1] only. To serve it under another name, through a proxy say, set "
        "GEMMSMITH_REQUIRE_KEYS=1 and create keys: gemmsmith keys create NAME --scope read.",
    )


def _unauthorized(kind: type[ProblemError], detail: str) -> ProblemError:
    return kind(
        status=401,
        kind="unauthorized",
        title="API key needed",
        detail=f"{detail} Send one as `Authorization: Bearer gsk_…`; an administrator makes one "
        "with: gemmsmith keys create NAME --scope read.",
        headers={"WWW-Authenticate": "Bearer"},
    )


def _forbidden(caller: Caller, needed: Scope) -> ProblemError:
    return ProblemError(
        status=403,
        kind="forbidden",
        title="Scope missing",
        detail=f"The API key {caller.name!r} lacks the scope {needed.value}. An administrator "
        f"makes one that has it with: gemmsmith keys create NAME --scope {needed.value}.",
        headers={"WWW-Authenticate": f'Bearer error="insufficient_scope", scope="{needed.value}"'},
    )
