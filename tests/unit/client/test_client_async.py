"""The asynchronous client. test_client_twins compares its calls with the synchronous client's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from gemmsmith import AsyncClient, InvalidProblem, NotTuned, ServiceUnavailable, TunedAnswer
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
            (untuned,) = await client.best_many([answer.problem], exact=True)
            assert isinstance(untuned, NotTuned)
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
            assert await handle.wait(timeout=30, on_progress=updates.append) == TunedAnswer.of(
                answer, answer
            )
            assert [(u.done, u.total) for u in updates] == [(1, 2), (1, 2)]
            assert server.seen[2].headers["last-event-id"] == "1"

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
