"""Requests to every route of the API and the pages, with odd text wherever text is allowed.

Some succeed: an odd filter matches nothing. None of them changes anything: each request for a
change has an invalid value, an invalid body, or names a thing that does not exist.
"""

from __future__ import annotations

import functools
import json
from random import Random
from typing import Any
from urllib.parse import quote

from service.http.app import create_app
from service.settings import Settings
from tests.support.openapi import described, routes

SURROGATE = "\ud800"
TEXTS = (
    "", " ", "\0", "a\0b", SURROGATE, f"x{SURROGATE}y", "\udfff", "\ufffe", "\U0001f600", "\u0663",
    "x" * 300, "x" * 6000, "%", "%zz", "%00", "..", "../..", "a/b", "a\\b", "\r\n", "\x1b[31m",
    "-1", "0", "1.5", "1e999", "NaN", "2147483648", "9223372036854775808", "9" * 30, "9" * 5000,
    "null", "true", "[]", "{}", "' OR 1=1 --", "\"'<script>", "{{7*7}}", "=1+1", "latest",
    "bf16", "tn", "4096", "sm90", "nvidia-h200-132sm", "parquet", "csv", "gain", "denied",
)  # fmt: skip
WRONG: tuple[Any, ...] = (
    "\0", SURROGATE, f"a{SURROGATE}", "\x7f" * 4000, [], {}, [[]], {"m": 1}, -1.5, 1e300,
    2**31, 2**63, -(2**63), 10**40,
)  # fmt: skip
"""Values that are invalid everywhere in a body."""
KNOWN_PAGE = "/ui/problems/nvidia-h200-132sm/bf16/tn/4096x4096x4096"
"""The page of the winner that the service has."""

HEADERS = (
    "Accept", "Accept-Encoding", "Authorization", "Cookie", "Content-Type", "Gemmsmith-Runs",
    "Idempotency-Key", "If-Match", "If-Modified-Since", "If-None-Match", "If-Range",
    "Last-Event-ID", "Origin", "Range", "Referer", "Sec-Fetch-Site", "User-Agent", "X-Request-Id",
    "X-Forwarded-For", "Forwarded", "Expect", "Upgrade", "TE",
)  # fmt: skip
VALUES = (
    b"", b"*", b'"', b'W/"', b"\xff\xfe", b"\xc3\xa9", b"a" * 5000, b"-1", b"9" * 400, b"bytes=0-",
    b"bytes=-0", b"bytes=9-2,1-1", b"text/html", b"text/csv;q=", b";q=1;;,", b"Bearer", b"Bearer ",
    b"Bearer \xff", b"Basic Og==", b"gemmsmith_key=\xff", b"gemmsmith_key=;=;", b"=", b"a=b; a=c",
    b"null", b"cross-site", b"http://elsewhere.example", b"100-continue", b"websocket", b"2",
    b"1=2;;=,", b"application/json", b"gzip, br;q=nan", b"\x01\x02", b"{}", b"cutlass3x",
)  # fmt: skip


@functools.cache
def places() -> tuple[tuple[str, str], ...]:
    """Method and path of every route, including those that OpenAPI does not describe."""
    public = {(method, path) for method, path, _ in routes(create_app(Settings.load({})).routes)}
    return tuple(sorted(public | {("GET", "/ui/static/{path}"), ("GET", "/{path}")}))


@functools.cache
def names() -> tuple[str, ...]:
    """The names of query parameters of all routes."""
    parameters = {"q", "sort", "next", "device", "after", "no_such", "", "m[]"}
    for operations in described()["paths"].values():
        for operation in operations.values():
            parameters |= {p["name"] for p in operation.get("parameters", ()) if p["in"] == "query"}
    return tuple(sorted(parameters))


def odd_request(random: Random) -> bytes:
    """Bytes for a socket: valid HTTP to a route of the service, with odd text in some places."""
    method, template = random.choice(places())
    if method == "GET" and random.random() < 0.1:
        method = "HEAD"
    path = _path(random, template)
    if template.endswith("/{sizes}/pin") and random.random() < 0.5:
        path = KNOWN_PAGE + "/pin"  # the revision in the form is always invalid
    query = _query(random) if method in ("GET", "HEAD") or random.random() < 0.3 else b""
    headers = [_header(random) for _ in range(random.choice((0, 0, 1, 1, 2, 4)))]
    body = b""
    if method in ("POST", "DELETE"):
        kind, body = _body(random, template)
        headers += [b"Content-Type: " + kind] if kind else []
        headers.append(b"Content-Length: %d" % len(body))
    line = f"{method} {path}".encode("latin-1") + (b"?" + query if query else b"") + b" HTTP/1.1"
    head = [line, b"Host: 127.0.0.1", b"Connection: close", *headers, b"", b""]
    return b"\r\n".join(head) + body


def _path(random: Random, template: str) -> str:
    parts = []
    for part in template.split("/"):
        if part.startswith("{"):
            # The thing does not exist, so no change of it can succeed.
            parts.append(_encoded(random, random.choice(TEXTS).replace("latest", "none")))
        else:
            parts.append(part)
    return "/".join(parts)


def _encoded(random: Random, text: str) -> str:
    raw = text.encode("utf-8", "surrogatepass")
    if random.random() < 0.1:
        raw += random.choice((b"\xff", b"\xc3", b"\xed\xa0\x80"))
    return quote(raw, safe="")


def _query(random: Random) -> bytes:
    chosen = random.choices(names(), k=random.choice((0, 1, 1, 2, 3, 6)))
    if chosen and random.random() < 0.2:
        chosen.append(chosen[0])
    pairs = [f"{quote(name)}={_encoded(random, random.choice(TEXTS))}" for name in chosen]
    if random.random() < 0.5:
        pairs += ["m=4096", "n=4096", "k=4096"]
    query = random.choice(("&", "&", "&", "&&", ";")).join(pairs)
    return query.encode() + random.choice((b"", b"", b"", b"&", b"%", b"%f", b"=", b"&=&="))


def _header(random: Random) -> bytes:
    name = random.choice(HEADERS).encode()
    if random.random() < 0.3:
        value = random.randbytes(random.randrange(1, 40))
        # A line end would begin another header; `malformed` sends such bytes.
        value = value.translate(None, b"\0\r\n")
    else:
        value = random.choice(VALUES)
    return name + b": " + value


def _body(random: Random, template: str) -> tuple[bytes, bytes]:
    """A media type, and a body with an invalid value."""
    form = template.startswith("/ui")
    kind = b"application/x-www-form-urlencoded" if form else b"application/json"
    match random.randrange(8):
        case 0:
            return kind, random.randbytes(random.randrange(1, 300))
        case 1:
            return random.choice((b"", b"text/plain", b"\xff/\xfe", b"multipart/form-data")), b"m=1"
        case 2:
            return b"application/json", b"[" * random.choice((3, 900, 60_000))
        case 3:
            return kind, b""
    members = {
        name: random.choice((1, 4096, "bf16", "tn", None, True)) for name in _members(random)
    }
    members[random.choice(("m", "n", "k", "problems", "name", "revision"))] = random.choice(WRONG)
    if template == "/best:batch" and random.random() < 0.7:
        members = {"problems": [{"m": 1, "n": 1, "k": 1}, members]}
    if form:
        pairs = [f"{name}={_encoded(random, str(value))}" for name, value in members.items()]
        if random.random() < 0.5:
            pairs = []
        revision = random.choice(("0", "-1", "00", "2147483648", "9" * 400, "%00", "%ff"))
        return kind, "&".join([*pairs, "m=0", f"revision={revision}"]).encode()
    text = json.dumps(members)
    if random.random() < 0.3:
        text = text[:-1] + f', "m": {random.choice(("1", "NaN", "-Infinity", "00"))}' + "}"
    return kind, text.encode()


def _members(random: Random) -> list[str]:
    every = (
        "m", "n", "k", "batch", "dtype", "layout", "device", "revision", "name", "scope",
        "problems", "effort", "calls", "groups", "epilogue", "key", "next", "no_such",
    )  # fmt: skip
    return random.sample(every, k=random.randrange(0, 6))
