"""The asynchronous client drives the same flows; here only what is its own."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from gemmsmith import AsyncClient, InvalidProblem, NotTuned, ServiceUnavailable
from tests.unit.client.misbehaving import (
    NOT_TUNED,
    UNAVAILABLE,
    Misbehaving,
    Say,
    job,
    never_wait,
    stream,
)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


def quick(server: Misbehaving, root: Path) -> AsyncClient:
    client = AsyncClient(server.url, retries=2, timeout=5, cache_dir=root)
    never_wait(client)
    return client


def test_best_retries_caches_and_falls_back(server, served, answer, tmp_path: Path) -> None:
    async def test() -> None:
        async with quick(server, tmp_path) as client:
            server.say(UNAVAILABLE, served)
            assert await client.best(256, 4096, 4096) == answer
            server.say(Say(200, json.dumps({"answers": [json.loads(NOT_TUNED.body)]}).encode()))
            (found,) = await client.best_many([answer.problem], exact=True)
            assert isinstance(found, NotTuned)
            server.stop()
            assert await client.best(256, 4096, 4096) == answer
            assert client.last_from_cache
            with pytest.raises(ServiceUnavailable):
                await client.best(1, 1, 1)
            with pytest.raises(InvalidProblem):
                await client.best(0, 1, 1)

    run(test())


def test_wait_resumes(server, served, answer, tmp_path: Path) -> None:
    async def test() -> None:
        async with quick(server, tmp_path) as client:
            server.say(
                job("waiting"),
                stream((1, "progress", {"done": 1, "total": 2}), drop=True),
                stream((2, "finished", {})),
                job("done"),
                served,
            )
            updates = []
            handle = await client.tune(256, 4096, 4096)
            assert await handle.wait(timeout=30, on_progress=updates.append) == answer
            assert [(u.done, u.total) for u in updates] == [(1, 2), (1, 2)]
            assert server.seen[2].headers["last-event-id"] == "1"

    run(test())


def test_tune_says_how_often_a_problem_is_run(server, tmp_path: Path) -> None:
    async def test() -> None:
        async with quick(server, tmp_path) as client:
            server.say(job("waiting", calls=96, expected_saving_us=48.0))
            handle = await client.tune(256, 4096, 4096, calls=96)
            assert json.loads(server.seen[0].body)["calls"] == 96
            assert handle.status.expected_saving_us == 48.0
            with pytest.raises(InvalidProblem, match="calls must be an integer in 0"):
                await client.tune(256, 4096, 4096, calls=-1)

    run(test())


def test_wait_can_be_cancelled(server, tmp_path: Path) -> None:
    async def test() -> None:
        async with quick(server, tmp_path) as client:
            server.say(job("waiting"), stream((1, "created", {}), drop=True))
            handle = await client.tune(256, 4096, 4096)
            with pytest.raises(TimeoutError):
                await handle.wait(timeout=0.2)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await handle.wait()

    run(test())


def test_listings_and_packs(server, tmp_path: Path) -> None:
    async def test() -> None:
        async with quick(server, tmp_path) as client:
            server.say(Say(200, b'{"trials": [{"id": 1}], "links": {}}'))
            assert [row["id"] async for row in client.results()] == [1]
            server.say(Say(200, b"ELF"))
            assert (await client.pack(hashlib.sha256(b"ELF").hexdigest())).read_bytes() == b"ELF"
            server.say(Say(200, b'{"devices": []}'))
            assert await client.devices() == []
            server.say(job("cancelled"))
            handle = await client.job("j1")
            assert (await handle.cancel()).state.terminal

    run(test())
