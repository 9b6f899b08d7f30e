"""Random requests, fixed by a seed, that a service must reject. None of them may change anything.

Each is either a `Call`, valid HTTP with an impossible request, or a `Raw`, bytes for a socket that
need not be HTTP. Half of them go to any route (`tests.support.oddities`). These may succeed, since
an odd filter may match nothing.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any
from urllib.parse import quote, urlencode

from tests.support.oddities import odd_request

ASKED: dict[str, Any] = {
    "m": 4096, "n": 4096, "k": 4096, "batch": 1, "dtype": "bf16", "layout": "tn",
}  # fmt: skip
BODIES: dict[str, dict[str, Any]] = {
    "/tune": {**ASKED, "effort": "quick", "priority": 0, "calls": 1},
    "/best:batch": {"problems": [ASKED], "exact": False},
    "/winners/pin": {**ASKED, "revision": 1},
    "/winners/unpin": ASKED,
    "/winners/rollback": ASKED,
    "/keys": {"name": "fuzz", "scope": "read"},
}
NUMBERS = {
    "/best": ("m", "n", "k", "batch"),
    "/winners/history": ("m", "n", "k", "batch", "limit", "after"),
    "/results": ("m", "n", "k", "batch", "limit", "after"),
    "/winners": ("m", "n", "k", "batch", "limit", "after"),
    "/jobs": ("limit", "after"),
    "/packs": ("limit", "after", "toolchain"),
    "/keys": ("limit", "after", "inactive"),
    "/audit": ("limit", "after", "action"),
}
PATHS = [*BODIES, *NUMBERS, "/snapshot", "/devices", "/jobs/latest", "/healthz", "/readyz", "/"]
WRONG: tuple[Any, ...] = (
    " 4096", "", "\u0663", "x" * 5000, "\U0001f600", -1, -(2**63), 2**53, 10**30, 1.5, None, [], {},
    [1], {"m": 1}, float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
"""Values for numbers and names. All are invalid everywhere in a body, except -1 as a priority."""
WRONG_TEXT = (
    "", "-1", "1.5", "1e400", "NaN", "-Infinity", "0x10", "\u0663", "9" * 30, "9" * 6000, "\x00",
    "\ud800", "1;2", "' OR 1=1 --", "../../etc/passwd", "[]", "{{7*7}}", "\U0001f600",
)  # fmt: skip
METHODS = ("PUT", "PATCH", "OPTIONS", "TRACE", "PROPFIND", "LOCK", "QUERY", "BREW", "get", "G E T")
TARGETS = ("etc/passwd", "gemmsmith.db", "state/gemmsmith.db", "proc/self/environ", "app.py")
CLIMBS = ("../", "..%2f", "%2e%2e/", "%2e%2e%2f", "%252e%252e%252f", "..\\", "..%5c", "....//",
          "%c0%ae%c0%ae/", "..%00/", "./../", "//", "%2f")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Call:
    """Valid HTTP."""

    method: str
    path: str
    content: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Raw:
    """Bytes for a socket. If `whole`, an answer is expected; if `odd`, it may be a success.

    Bytes that are not `whole` may end in the middle of a request.
    """

    sent: bytes
    whole: bool = True
    odd: bool = False


def malformed(seed: int) -> Iterator[Call | Raw]:
    """Yields requests without end."""
    random = Random(seed)
    while True:
        yield random.choice(KINDS)(random)
        yield Raw(sent=odd_request(random), odd=True)


def _wrong_value(random: Random) -> Call:
    path = random.choice([*BODIES])
    body = dict(BODIES[path])
    wrong: Any = random.choice(WRONG)
    match random.randrange(4):
        case 0:
            names = [name for name in body if name != "priority" or wrong != -1]
            body[random.choice(names)] = wrong
        case 1:
            body[f"no_such_{random.randrange(1000)}"] = wrong
        case 2:
            body.pop(next(iter(body)))
        case _:
            return _post(path, json.dumps(wrong).encode())
    return _post(path, json.dumps(body).encode())


def _wrong_query(random: Random) -> Call:
    path = random.choice([*NUMBERS])
    given: dict[str, Any] = {"m": 1, "n": 1, "k": 1} if "m" in NUMBERS[path] else {}
    name = random.choice([*NUMBERS[path], f"no_such_{random.randrange(1000)}"])
    given[name] = random.choice(WRONG_TEXT).encode("utf-8", "surrogatepass")
    return Call(method="GET", path=f"{path}?{urlencode(given)}")


def _no_json(random: Random) -> Call:
    path = random.choice([*BODIES])
    text = json.dumps(BODIES[path]).encode()
    match random.randrange(7):
        case 0:
            return _post(path, text[: random.randrange(1, len(text))])
        case 1:
            place = random.randrange(len(text))
            return _post(path, text[:place] + random.choice([b"\xff", b"\xc3", b"\x00"]) + text)
        case 2:
            return _post(path, gzip.compress(text), **{"Content-Encoding": "gzip"})
        case 3:
            kind = random.choice(["text/plain", "application/xml", "multipart/form-data", "json"])
            return _post(path, text, **{"Content-Type": kind})
        case 4:
            return _post(path, b"9" * random.choice([400, 5000, 50_000]))
        case 5:
            return _post(path, random.randbytes(random.randrange(1, 2000)))
        case _:
            return _post(path, text + text)


def _deep(random: Random) -> Call:
    path = random.choice([*BODIES])
    depth = random.choice([50, 200, 500, 900, 990, 1000, 3000, 100_000])
    opened, closed = random.choice([("[", "]"), ('{"m":', "}")])
    nest = opened * depth + "1" + closed * depth
    if random.random() < 0.5:
        return _post(path, nest.encode())
    name = random.choice([*BODIES[path]])
    rest = {key: value for key, value in BODIES[path].items() if key != name}
    return _post(path, f'{json.dumps(rest)[:-1]}, "{name}": {nest}}}'.encode())


def _post(path: str, content: bytes, **headers: str) -> Call:
    headers = {"Content-Type": "application/json", **headers}
    return Call(method="POST", path=path, content=content, headers=headers)


def _climbing(random: Random) -> Raw:
    folder = random.choice(["/packs/", "/kernels/", "/jobs/", "/ui/static/", "/"])
    climb = "".join(random.choices(CLIMBS, k=random.randrange(1, 9)))
    return _raw(f"GET {folder}{climb}{random.choice(TARGETS)} HTTP/1.1")


def _unknown_path(random: Random) -> Raw:
    place = random.choice(["/packs/", "/kernels/", "/jobs/", "/nothing/", "/ui/nothing/"])
    name = quote(random.randbytes(random.randrange(1, 60)), safe="")
    long = "x" * random.choice([0, 0, 300, 7000, 20_000])
    return _raw(f"GET {place}x{name}{long} HTTP/1.1")


def _wrong_method(random: Random) -> Raw:
    path = random.choice([path for path in PATHS if path not in ("/best", "/")])
    if random.random() < 0.2:
        return _raw("GET /tune HTTP/1.1")
    return _raw(f"{random.choice(METHODS)} {path} HTTP/1.1")


def _odd_headers(random: Random) -> Raw:
    repeated = random.choice(["Host: 127.0.0.1", "Host: example.org", "Content-Length: 7"])
    odd = random.choice(
        [
            repeated,
            "Content-Length: -1",
            "Content-Length: +5",
            "Content-Length: 5, 5",
            "Content-Length: 0x5",
            "Content-Length: 99999999999999999999999",
            "Transfer-Encoding: chunked\r\nContent-Length: 5",
            "Transfer-Encoding: gzip",
            "Transfer-Encoding: chunked, identity",
            "no colon",
            ": no name",
            "Na me: x",
            "X-Null: \x00",
            "X-Long: " + "y" * 40_000,
            "\r\n".join(f"X-{i}: {'y' * 400}" for i in range(100)),
        ]
    )
    return _raw("POST /tune HTTP/1.1", odd, "Content-Length: 5", body=b"12345")


def _too_large(random: Random) -> Raw:
    """Announces a body that is larger than the limit, and sends a part of it."""
    length = random.choice([5 * 2**20, 2**31, 2**63])
    return _raw("POST /tune HTTP/1.1", f"Content-Length: {length}", body=b" " * 100)


def _odd_chunks(random: Random) -> Raw:
    body = random.choice(
        [
            b"zz\r\n",
            b"-1\r\n",
            b"5\r\n123456789\r\n0\r\n\r\n",
            b"ffffffffffffffffff\r\n",
            b"5;\x00\r\n",
        ]
    )
    return _raw("POST /tune HTTP/1.1", "Transfer-Encoding: chunked", body=body)


def _torn(random: Random) -> Raw:
    content = json.dumps(BODIES["/tune"]).encode()
    whole = _raw(
        "POST /tune HTTP/1.1",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
        body=content,
    ).sent
    return Raw(sent=whole[: random.randrange(1, len(whole))], whole=False)


def _noise(random: Random) -> Raw:
    noise = random.randbytes(random.randrange(1, 3000))
    start = random.choice([b"", b"GET ", b"GET / HTTP/1.1\r\n", b"\x16\x03\x01\x02\x00", b"PRI * "])
    return Raw(sent=start + noise, whole=False)


def _flipped(random: Random) -> Raw:
    """A lookup with an invalid character in its request line."""
    line = bytearray(
        b"GET /best?m=0&n=1&k=1 HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
    )
    line[random.randrange(4, 22)] = random.choice([0, 1, 10, 13, 127])
    return Raw(sent=bytes(line), whole=False)


def _raw(line: str, *headers: str, body: bytes = b"") -> Raw:
    head = "\r\n".join([line, "Host: 127.0.0.1", "Connection: close", *headers, "", ""])
    return Raw(sent=head.encode("latin-1") + body)


KINDS: tuple[Callable[[Random], Call | Raw], ...] = (
    _wrong_value,
    _wrong_query,
    _no_json,
    _deep,
    _climbing,
    _unknown_path,
    _wrong_method,
    _odd_headers,
    _too_large,
    _odd_chunks,
    _torn,
    _noise,
    _flipped,
)
