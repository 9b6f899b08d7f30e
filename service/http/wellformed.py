"""Refuses what no handler should have to think of, before any of them sees the request.

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
from typing import Any
from urllib.parse import unquote_to_bytes

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gemmsmith.core.text import ACCEPTED, flaw, flaw_in
from service.errors import ProblemError, invalid_field
from service.http.middleware import put_back

BATCH = "/best:batch"
FORM = b"application/x-www-form-urlencoded"

_MOST_FIELDS = 64
"""Of a query or a form."""

_MOST_VALUES = 256
"""Of a small JSON body; an order has 20."""


class RefuseIllFormed:
    """Inside `LimitBody`, whose first message is the whole body."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        message: Message | None = None
        try:
            _check_path(scope)
            _check_pairs(scope["query_string"])
            if scope["method"] in ("POST", "PUT", "PATCH", "DELETE"):
                message = await receive()
                _check_body(scope, message)
        except ProblemError as error:
            await error.response(scope["path"])(scope, receive, send)
            return
        if message is not None:
            receive = put_back(message, receive)
        await self.app(scope, receive, send)


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


def _check_body(scope: Scope, message: Message) -> None:
    content: bytes = message.get("body", b"")
    if not content:
        return
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
