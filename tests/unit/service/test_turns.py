"""Requests that may write take turns; those that read go past them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from service.http import middleware
from service.http.middleware import QueueWrites


async def _ask(app: QueueWrites, method: str, path: str) -> int:
    said: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        said.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing is read")

    await app({"type": "http", "method": method, "path": path, "headers": []}, receive, send)
    return int(said[0]["status"])


def test_reads_are_worked_on_while_writes_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "WRITE_PATIENCE_S", 0.2)
    writing: list[str] = []

    async def scenario() -> None:
        unlocked = asyncio.Event()

        async def routes(scope: Any, _receive: Any, send: Any) -> None:
            if scope["path"] == "/tune":
                writing.append(scope["path"])
                await unlocked.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})

        app = QueueWrites(routes)
        writes = [asyncio.create_task(_ask(app, "POST", "/tune")) for _ in range(20)]
        await asyncio.sleep(0.05)
        assert len(writing) == 16
        assert await _ask(app, "GET", "/jobs") == 200
        assert await _ask(app, "POST", "/best:batch") == 200
        assert await _ask(app, "POST", "/jobs/x/retry") == 503
        unlocked.set()
        assert sorted(await asyncio.gather(*writes)) == [200] * 16 + [503] * 4
        assert await _ask(app, "POST", "/tune") == 200, "the turns are given back"

    asyncio.run(scenario())
