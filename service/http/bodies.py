"""Requests as handlers may see them: bodies of a limited length, text that is well-formed.

Bodies are read for those who may come in, up to a length, and to a share of memory. Requests with a
body change something, so they may not come from a page of another site. Who brings no key, or a
wrong one, is refused before the body is read. Then the connection is closed, because the rest of
the body is not going to be read.

Paths, queries, forms and JSON bodies are Unicode text without NUL (`gemmsmith.core.text`), and say
each thing once: of a parameter, a field or a member that is given twice, one reader takes the first
and another the last. JSON is what RFC 8259 calls JSON: no NaN, no other encoding than UTF-8.

All of it is done in the event loop, here and in the framework that reads a body after this. So both
have few parts, which is counted first: 64 KiB of unknown members took 20 ms, and a megabyte of them
one second. The body of a batch of lookups has many: it is left to `service.http.batches`.

A lookup that has nothing to unquote costs 2 µs here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any
from urllib.parse import unquote_to_bytes

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from gemmsmith.core.text import ACCEPTED, flaw, flaw_in
from service.errors import ProblemError, invalid_field
from service.http.access import LOGIN, LOGOUT, Doorkeeper, client_name, whose
from service.http.access import Scope as KeyScope
from service.http.middleware import SAFE, put_back

BATCH = "/best:batch"
FORM = b"application/x-www-form-urlencoded"

_MOST_FIELDS = 64
"""Of a query or a form."""

_MOST_VALUES = 256
"""Of a small JSON body; an order has 20."""

SMALL_BYTES = 64 * 1024
"""Of any body but a batch of lookups; an order has a few hundred."""

_FORM_BYTES = 16 * 1024
"""Of a body that may come without a key: the login form, with the key itself."""

_SHARE_BYTES = 16 * 2**20
"""Of one client's bodies in memory, and room for the largest in any case."""

_SHARES = 4
"""Batches of all clients together may hold so many shares. Small bodies are always read."""

_FORMS = frozenset({LOGIN, LOGOUT})


class CheckRequest:
    """Refuses requests before they are parsed: bodies of strangers, long ones, what is ill-formed.

    What is inside gets the whole body in one message. `limit` is the longest in bytes.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app = app
        self.limit = limit
        self._share = max(limit, _SHARE_BYTES)
        self._held: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        client, body = "", bytearray()
        is_read = scope["method"] in SAFE
        try:
            try:
                if not is_read:
                    _check_origin(scope)
                    client = await _client(scope)
                    if not await self._read(scope, receive, body, client):
                        return
                    is_read = True
                    whole = {"type": "http.request", "body": bytes(body), "more_body": False}
                    receive = put_back(whole, receive)
                _check_path(scope)
                _check_pairs(scope["query_string"])
                if body:
                    _check_body(scope, bytes(body))
            except ProblemError as error:
                closing = {} if is_read else {"Connection": "close"}
                refusal = replace(error, headers={**error.headers, **closing})
                await refusal.response(scope["path"])(scope, receive, send)
                return
            await self.app(scope, receive, send)
        finally:
            self._held[client] -= len(body)
            if not self._held[client]:
                del self._held[client]

    async def _read(self, scope: Scope, receive: Receive, body: bytearray, client: str) -> bool:
        """Read the body whole; whether its client is still there."""
        is_batch = scope["path"] == BATCH
        limit = self.limit if is_batch else min(self.limit, SMALL_BYTES)
        if scope["path"] in _FORMS:
            limit = min(limit, _FORM_BYTES)
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > limit:
            raise _too_large(limit)
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return False
            piece = message.get("body", b"")
            if len(body) + len(piece) > limit:
                raise _too_large(limit)
            if self._held[client] + len(piece) > self._share:
                raise _too_many(429, "this client")
            if is_batch and self._held.total() + len(piece) > _SHARES * self._share:
                raise _too_many(503, "all clients")
            body += piece
            self._held[client] += len(piece)
            more = message.get("more_body", False)
        return True


def _check_origin(scope: Scope) -> None:
    """Refuse what another site's page makes a browser send here, with the browser's cookie.

    Browsers say where a request comes from, by `Sec-Fetch-Site` or at least by `Origin`; what says
    neither is no browser's. Reading is harmless: the other page is not shown the answer.
    """
    headers = dict(scope["headers"])
    site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin")
    if site is not None:
        foreign = site not in (b"same-origin", b"none")
    else:  # the scheme is not compared: a proxy may speak https for us
        foreign = origin is not None and origin.partition(b"://")[2] != headers.get(b"host")
    if foreign:
        raise ProblemError(
            status=403,
            kind="cross-site",
            title="Cross-site request",
            detail="Requests from pages of other sites cannot change anything. Use the service's "
            "own pages, or a program, which sends neither Origin nor Sec-Fetch-Site.",
        )


async def _client(scope: Scope) -> str:
    """Whose body it is.

    Raises:
        ProblemError: the client has no key; without one, only forms may be sent.
    """
    if scope["path"] in _FORMS:
        return client_name(scope)
    door: Doorkeeper = scope["app"].state.service.access
    # Whatever it may do, it may read.
    return whose(await door.welcome(scope, KeyScope.READ), scope)


def _too_large(limit: int) -> ProblemError:
    return ProblemError(
        status=413,
        kind="body-too-large",
        detail=f"A body can have at most {limit} bytes here; send fewer problems per call.",
    )


def _too_many(status: int, senders: str) -> ProblemError:
    return ProblemError(
        status=status,
        kind="too-many-bodies",
        detail=f"The bodies of {senders} together exceed the memory limit. Try again.",
        headers={"Retry-After": "1"},
    )


def number_of_values(content: bytes) -> int:
    """At least as many values are in that JSON: each but one follows a comma or opens a list."""
    return content.count(b",") + content.count(b"[") + content.count(b"{")


def check_small(content: bytes) -> None:
    """As `check_json`, for a body that is then decoded and checked in the event loop.

    Raises:
        ProblemError: as `check_json`; 422 also where it has too many values.
    """
    if number_of_values(content) > _MOST_VALUES:
        raise invalid_field("body", "has too many values", f"at most {_MOST_VALUES}")
    check_json(content)


def check_json(content: bytes, where: str = "") -> Any:
    """Decode JSON; refuse what is not JSON, has unusable text in it, or a member twice.

    `where` is the content's place in a larger document.

    Raises:
        ProblemError: 400, or 422 where a place in it can be named.
    """
    try:
        document = msgspec.json.decode(content)
        if b"\\u" not in content:
            # Without escapes, dropping a repeated member drops colons, and nothing else does.
            if msgspec.json.encode(document).count(b":") == content.count(b":"):
                return document
        elif flawed := flaw_in(document):
            place, what = flawed
            raise invalid_field(f"{where}.{place}".strip(".")[:200] or "body", what, ACCEPTED)
        json.loads(content, object_pairs_hook=_once)
    except RecursionError:
        raise no_json("it is nested too deeply") from None
    except (ValueError, OverflowError) as error:  # msgspec's and json's own are ValueErrors
        raise no_json(str(error)) from None
    return document


def _once(members: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(members)
    if len(document) < len(members):
        raise _repeated(_first_repeated(name for name, _ in members))
    return document


def _check_path(scope: Scope) -> None:
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    if b"%" in raw or not raw.isascii():
        _text(raw, "path")


def _check_pairs(raw: bytes, where: str = "query") -> None:
    """Of a query, or of a form's fields."""
    if not raw:
        return
    if raw.count(b"&") >= _MOST_FIELDS:
        raise invalid_field(where, "has too many fields", f"at most {_MOST_FIELDS}")
    pairs = [pair.partition(b"=") for pair in raw.split(b"&") if pair]
    if b"%" in raw or b"+" in raw or not raw.isascii():
        names = [_text(name.replace(b"+", b" "), where) for name, _, _ in pairs]
        for name, (_, _, value) in zip(names, pairs, strict=True):
            _text(value, name[:80] or where)
    else:
        names = [name.decode() for name, _, _ in pairs]
    if len(set(names)) < len(names):
        raise _repeated(_first_repeated(names))


def _check_body(scope: Scope, content: bytes) -> None:
    # All of them: of two media types, one reader goes by the first and another by the last.
    kinds = [value.lower() for name, value in scope["headers"] if name == b"content-type"]
    if any(b"json" in kind for kind in kinds) and scope["path"] != BATCH:
        check_small(content)
    if any(kind.startswith(FORM) for kind in kinds):
        _check_pairs(content, "body")


def _text(raw: bytes, where: str) -> str:
    """What was percent-encoded.

    Raises:
        ProblemError: 422, it is no text.
    """
    try:
        text = unquote_to_bytes(raw).decode()
    except UnicodeDecodeError:
        raise invalid_field(where, "is not UTF-8", ACCEPTED) from None
    if reason := flaw(text):
        raise invalid_field(where, reason, ACCEPTED)
    return text


def _first_repeated(names: Iterable[str]) -> str:
    return next(name for name, times in Counter(names).items() if times > 1)


def _repeated(name: str) -> ProblemError:
    return invalid_field(name[:80] or "query", "is given more than once", "one value")


def no_json(why: str) -> ProblemError:
    """The 400 for a body that is not JSON."""
    return ProblemError(
        status=400,
        kind="invalid-json",
        title="Invalid JSON",
        detail=f"The body is not JSON: {why[:200]}.",
    )
