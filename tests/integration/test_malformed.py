"""Malformed requests by the thousand: all refused, nothing written, nothing left over.

A failure names its request and the seed; GEMMSMITH_FUZZ_SEED repeats it, GEMMSMITH_MALFORMED says
how many there are.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from random import SystemRandom
from typing import Any

import httpx
import psutil
import pytest
from sqlalchemy import select

from gemmsmith.core.problem import Problem
from tests.support.malformed import Call, Raw, malformed
from tests.support.processes import address, serving
from tests.support.serving import winner
from tuner.store import Store
from tuner.store.audit import Action
from tuner.store.database import Database
from tuner.store.models import AuditRow, Base

KNOWN = Problem(m=4096, n=4096, k=4096)
SENDERS = 8
ANSWER_WITHIN_S = 30
MAY_GROW = 64 * 2**20
"""Bytes of memory, after the first requests have filled what is kept: far less than is sent."""


ON_DEMAND = int(os.environ.get("GEMMSMITH_MALFORMED", "5000"))
AS_LONG_AS_IT_TAKES = [pytest.mark.long, pytest.mark.timeout(3600)]


@pytest.fixture
def service(store_url: str, tmp_path: Path) -> Iterator[tuple[psutil.Process, str]]:
    """A served process that knows a winner, and its address."""
    with Store.open(store_url) as store:
        store.promote(winner(KNOWN))
    with serving(tmp_path, GEMMSMITH_DATABASE=store_url) as (process, banner):
        yield psutil.Process(process.pid), address(banner)


@pytest.mark.parametrize(
    ("database_kind", "count", "seed"),
    [
        pytest.param("sqlite", 2_000, 20261123, id="the same 2000"),
        pytest.param("sqlite", ON_DEMAND, None, marks=AS_LONG_AS_IT_TAKES, id="others, on SQLite"),
        pytest.param(
            "postgresql",
            ON_DEMAND,
            None,
            marks=[*AS_LONG_AS_IT_TAKES, pytest.mark.postgresql],
            id="others, on PostgreSQL",
        ),
    ],
)
def test_malformed_requests_are_refused(
    service: tuple[psutil.Process, str],
    store_url: str,
    tmp_path: Path,
    count: int,
    seed: int | None,
) -> None:
    process, url = service
    seed = int(os.environ.get("GEMMSMITH_FUZZ_SEED") or seed or SystemRandom().randrange(2**32))
    print(f"GEMMSMITH_FUZZ_SEED={seed}")
    before = everything(store_url, tmp_path)
    requests = malformed(seed)
    seen: Counter[int] = Counter()
    warm = count // 5
    send(url, itertools.islice(requests, warm), seen)
    held = process.memory_info().rss
    send(url, itertools.islice(requests, count - warm), seen)
    print(dict(sorted(seen.items())))

    grown = process.memory_info().rss - held
    assert grown < MAY_GROW, f"{grown} bytes more"
    # The last ones are closed in a moment (0.1 s was seen with both cores busy); a leak stays.
    deadline = time.monotonic() + 30
    while len(open_ := accepted(process, url)) >= 5 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(open_) < 5, "connections are left open"
    print(f"{time.monotonic() - deadline + 30:.1f} s until they are closed")
    assert everything(store_url, tmp_path) == before, "something was written"
    log = (tmp_path / "log").read_text(encoding="utf-8")
    assert "internal error" not in log
    assert "Traceback" not in log
    assert {400, 404, 405, 413, 414, 421, 422, 431} <= seen.keys(), "these were to be seen"
    assert seen[0] < count / 4, "most were to be answered"
    with Store.open(store_url) as store:
        denied = store.audit.entries(action=Action.DENIED, limit=None)
        assert len(denied) < 100, "denials are summed up"
        assert store.audit.verify().fault is None
    with httpx.Client(base_url=url, timeout=20) as client:
        asked = {"m": KNOWN.m, "n": KNOWN.n, "k": KNOWN.k}
        assert client.get("/best", params=asked).json()["match"] == "exact"
        assert client.get("/readyz").json()["status"] == "ok"
        assert client.post("/tune", json=asked).status_code == 202


def accepted(process: psutil.Process, url: str) -> list[Any]:
    """Connections to the service; those that it has to its database are left out."""
    port = httpx.URL(url).port
    return [one for one in process.net_connections("tcp") if one.laddr[1] == port]


def everything(url: str, folder: Path) -> tuple[dict[str, list[Any]], list[Path]]:
    """All that the database holds but denials, which are to be noted, and the files there are."""
    with closing(Database(url)) as database, database.read() as session:
        rows = {
            name: sorted(map(repr, session.execute(select(table)).all()))
            for name, table in Base.metadata.tables.items()
            if name not in ("audit", "audit_head")
        }
        query = select(AuditRow.id, AuditRow.subject).where(AuditRow.action != Action.DENIED)
        rows["audit"] = sorted(map(repr, session.execute(query).all()))
    kept = (path for path in folder.rglob("*") if ".db" not in path.name)
    return rows, sorted(kept)


def send(url: str, requests: Iterator[Call | Raw], seen: Counter[int]) -> None:
    """Send all, and count the statuses; 0 is no answer to what was torn off."""
    drawing = threading.Lock()

    def sender() -> Counter[int]:
        counted: Counter[int] = Counter()
        with httpx.Client(base_url=url, timeout=ANSWER_WITHIN_S) as client:
            while True:
                with drawing:
                    request = next(requests, None)
                if request is None:
                    return counted
                counted[refused(client, request)] += 1

    with ThreadPoolExecutor(SENDERS) as pool:
        for future in [pool.submit(sender) for _ in range(SENDERS)]:
            seen += future.result()


def refused(client: httpx.Client, request: Call | Raw) -> int:
    """Send it and check the answer; its status, 0 without one."""
    where = f"{request!r:.600}"
    began = time.monotonic()
    if isinstance(request, Call):
        reply = client.request(
            request.method, request.path, content=request.content, headers=request.headers
        )
        status, kind, body = reply.status_code, reply.headers["content-type"], reply.content
    else:
        said = exchange(client, request)
        head, _, body = said.partition(b"\r\n\r\n")
        assert head or not request.whole, f"no answer to {where}"
        if not head:
            return 0
        if head.startswith(b"HTTP/1.1 100 "):  # what `Expect: 100-continue` asks for
            head, _, body = body.partition(b"\r\n\r\n")
        status = int(head.split(b" ")[1])
        match = re.search(rb"(?i)content-type: ([^\r]+)", head)
        assert match or status < 400, (where, head)
        kind = match[1].decode() if match else ""
    assert time.monotonic() - began < ANSWER_WITHIN_S, where
    if status == 200 and isinstance(request, Call) and request.path == "/best:batch":
        (document,) = json.loads(body)["answers"]  # a wrong problem costs its own answer only
        assert document["status"] == 422, where
        return 422
    if isinstance(request, Raw) and request.odd and 200 <= status < 400:
        return status
    assert 400 <= status < 500, f"{status} {body[:300]!r} to {where}"
    if kind.startswith("text/html"):  # for people, under /ui only
        assert isinstance(request, Raw), where
        assert request.sent.split(b" ")[1].startswith(b"/ui"), where
        return status
    assert kind == "application/problem+json", f"{kind} to {where}"
    if isinstance(request, Raw) and request.sent.startswith(b"HEAD ") and not body:
        return status
    document = json.loads(body)
    assert document["status"] == status, where
    assert document["type"].startswith("urn:gemmsmith:problem:"), where
    return status


def exchange(client: httpx.Client, request: Raw) -> bytes:
    """All that is answered until the service hangs up, which it has to."""
    host, port = client.base_url.host, client.base_url.port
    assert port
    said = bytearray()
    with (
        socket.create_connection((host, port), timeout=ANSWER_WITHIN_S) as link,
        contextlib.suppress(ConnectionError),  # it may hang up before it has read everything
    ):
        link.sendall(request.sent)
        if not request.whole:
            link.shutdown(socket.SHUT_WR)
        while data := link.recv(65536):
            said += data
    return bytes(said)
