"""A client in a process and in its forked children: each has its own connections and files."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from gemmsmith import Answer, AsyncClient, Client, Lookup, Problem, Snapshot
from tests.support.replacing import replace
from tests.support.snapshots import CONTENT, PACK, row, snapshot
from tests.unit.client.misbehaving import Misbehaving, Say, Seen, job, never_wait, stream

SIZES = [(4096, 6144, 1024), (256, 4096, 4096), (1024, 4096, 4096), (2048, 2048, 2048)]


def in_child(work: Callable[[], object]) -> Callable[[], int]:
    """Run this in a forked child. Returns a function that waits for the exit status."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = int(work() or 0)
        finally:
            os._exit(status)
    return lambda: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture
def url(server: Misbehaving, answer: Answer) -> str:
    """Of a service that answers each `GET /best` for its own problem."""

    def reply(seen: Seen) -> Say:
        query = parse_qs(urlsplit(seen.path).query)
        problem = Problem(*(int(query[name][0]) for name in "mnk"))
        own = replace(answer, problem=problem, measured=problem)
        return Say(body=json.dumps(own.to_dict()).encode())

    server.say(reply)
    return server.url


def misses(client: Client, first: int) -> int:
    """The number of lookups that fail or get an answer for another problem."""
    count = 0
    for size in itertools.islice(itertools.cycle(SIZES), first, first + 60):
        try:
            count += client.best(*size).problem != Problem(*size)
        except Exception:  # noqa: BLE001
            count += 1
    return count


def test_children_share_no_connection(url: str) -> None:
    with Client(url, cache_dir=None, retries=0) as client:
        for _ in range(3):
            assert misses(client, 0) == 0  # opens a connection
            ends = [in_child(lambda i=i: misses(client, i)) for i in range(3)]
            assert misses(client, 3) == 0
            assert [end() for end in ends] == [0, 0, 0]
        assert misses(client, 0) == 0


def test_grandchildren_and_threads_share_no_connection(url: str) -> None:
    with Client(url, cache_dir=None, retries=0) as client:
        stop = threading.Event()

        def ask() -> None:
            while not stop.is_set():
                client.best(*SIZES[0])

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            # At this moment threads of the parent hold the locks of its connections.
            ends = [
                in_child(lambda: misses(client, 1) + in_child(lambda: misses(client, 2))())
                for _ in range(5)
            ]
            assert [end() for end in ends] == [0] * 5
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def test_an_asynchronous_client_is_of_its_process_too(url: str) -> None:
    client = AsyncClient(url, cache_dir=None, retries=0)

    async def ask(first: int) -> int:
        sizes = itertools.islice(itertools.cycle(SIZES), first, first + 40)
        return sum([(await client.best(*size)).problem != Problem(*size) for size in sizes])

    async def both() -> tuple[int, int]:
        await ask(0)
        end = in_child(lambda: run_anew(ask(1)))
        mine = await ask(2)
        theirs = await asyncio.to_thread(end)
        await client.close()
        return mine, theirs

    assert asyncio.run(both()) == (0, 0)


def run_anew(work: object) -> int:
    """Run in a new event loop of this process."""
    asyncio._set_running_loop(None)
    result: int = asyncio.new_event_loop().run_until_complete(work)  # type: ignore[arg-type]
    return result


def test_a_child_reads_events_on_its_own(server: Misbehaving, tmp_path: Path) -> None:
    first = stream((1, "started", {}), drop=True)
    rest = stream((2, "progress", {}), (3, "finished", {}))
    server.say(first, rest)
    with Client(server.url, cache_dir=None) as client:
        never_wait(client)
        events = client.job_events("j1")
        assert next(events) is not None
        server.say(job("running"), rest)

        def child() -> int:
            kinds = [event.kind for event in events if event is not None]
            return int(kinds != ["progress", "finished"])

        assert in_child(child)() == 0


def test_a_child_keeps_its_parents_packs(server: Misbehaving) -> None:
    server.say(Say(body=CONTENT))
    with Client(server.url, cache_dir=None) as client:
        path = client.pack(PACK)

        def child() -> int:
            mine = client.pack(PACK)
            mine_is_other = mine != path and mine.read_bytes() == CONTENT
            client.close()
            return int(not mine_is_other or mine.exists())

        assert in_child(child)() == 0
        assert path.read_bytes() == CONTENT
    assert not path.exists()


def test_a_child_that_ends_leaves_its_parents_packs(server: Misbehaving) -> None:
    server.say(Say(body=CONTENT))
    program = f"""
import os, sys
from gemmsmith import Client
client = Client({server.url!r}, cache_dir=None)
path = client.pack({PACK!r})
if os.fork() == 0:
    sys.exit()  # runs what is to be run at exit
os.wait()
assert path.exists()
print(path)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not Path(done.stdout.strip()).exists()


def test_a_child_refreshes_on_its_own(tmp_path: Path) -> None:
    old, new = snapshot(row(Problem(256, 4096, 4096))), snapshot(row(Problem(64, 64, 64)))
    newest = tmp_path / "newest"
    holding, held = threading.Event(), threading.Event()

    def fetch(known: Snapshot) -> Snapshot:
        if os.getpid() == parent:
            held.set()
            holding.wait(20)  # while holding the lock
            return known
        return new if newest.exists() else known

    parent = os.getpid()
    lookup = Lookup(old, fetch=fetch, interval=0.02)
    assert held.wait(20)

    def child() -> int:
        if threading.active_count() != 1:
            return 1  # a child without a lookup needs no thread
        newest.touch()
        lookup.lookup("bf16", "tn", 1, 1, 1)
        deadline = time.monotonic() + 20
        while lookup.snapshot != new and time.monotonic() < deadline:
            time.sleep(0.01)
        return int(lookup.snapshot != new)

    assert in_child(child)() == 0
    assert lookup.snapshot == old
    holding.set()
    lookup.close()
    assert in_child(lambda: starts_threads(lookup))() == 0


def starts_threads(lookup: Lookup) -> bool:
    lookup.lookup("bf16", "tn", 1, 1, 1)
    return threading.active_count() > 1


@pytest.mark.parametrize("pin", [True, False])
def test_a_child_of_a_pinned_lookup_starts_nothing(pin: bool) -> None:
    lookup = Lookup(snapshot(row(Problem(64, 64, 64))), pin=pin)
    assert in_child(lambda: starts_threads(lookup))() == 0
