"""Requests take turns: clients have shares, what reads goes past what writes, answers are taken."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import ASGIApp, Message

from service.http import turns
from service.http.access import Caller, Scope
from service.http.turns import Lookups, Shares, TakeTurns, too_many_requests

Send = Callable[[Message], Awaitable[None]]


class Access:
    """Knows every key by its name."""

    def admit(self, scope: Any, _: Scope) -> Caller:
        return Caller(name=scope["key"], scopes=frozenset(Scope))


def service() -> Any:
    state = SimpleNamespace(
        access=Access(), in_progress=Shares(100, too_many_requests), lookups=Lookups(1000)
    )
    return SimpleNamespace(state=SimpleNamespace(service=state))


APP = service()


async def _ask(
    app: ASGIApp, method: str, path: str, key: str = "ann", send: Send | None = None
) -> int:
    said: list[Message] = []

    async def kept(message: Message) -> None:
        said.append(message)
        if send is not None:
            await send(message)

    messages = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        return await asyncio.Future()  # the client stays

    scope = {"type": "http", "method": method, "path": path, "key": key, "app": APP, "headers": []}
    await app(scope, receive, kept)
    return int(said[0]["status"])


async def answer(send: Send, *bodies: bytes) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for body in bodies[:-1]:
        await send({"type": "http.response.body", "body": body, "more_body": True})
    await send({"type": "http.response.body", "body": bodies[-1]})


def test_reads_are_worked_on_while_writes_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "PATIENCE_S", 0.3)
    writing: list[str] = []

    async def scenario() -> None:
        unlocked = asyncio.Event()

        async def routes(scope: Any, _receive: Any, send: Any) -> None:
            if scope["path"] == "/tune":
                writing.append(scope["key"])
                await unlocked.wait()
            await answer(send, b"")

        app = TakeTurns(routes)
        writes = [asyncio.create_task(_ask(app, "POST", "/tune", key)) for key in "abcdefghi" * 3]
        await asyncio.sleep(0.1)
        assert len(writing) == 16
        assert max(Counter(writing).values()) == 2
        for path in ("/jobs", "/best", "/snapshot", "/healthz"):
            assert await _ask(app, "GET", path) == 200
        assert await _ask(app, "POST", "/best:batch") == 200
        assert await _ask(app, "POST", "/jobs/x/retry") == 503
        unlocked.set()
        assert sorted(await asyncio.gather(*writes)) == [200] * 16 + [503] * 11
        assert await _ask(app, "POST", "/tune") == 200, "the turns are given back"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("bodies", "held"),
    [
        ([b"x" * 3_000_000], True),
        ([b"x" * 65_536], False),
        ([b""], False),
        ([b"x" * 3_000_000, b""], False),
    ],
    ids=["a long answer", "a short one", "nothing", "a stream"],
)
def test_an_answer_in_memory_is_part_of_its_clients_share(bodies: list[bytes], held: bool) -> None:
    async def scenario() -> None:
        taken = asyncio.Event()
        sent: list[bytes] = []

        async def routes(_scope: Any, _receive: Any, send: Any) -> None:
            await answer(send, *bodies)

        async def slowly(message: Message) -> None:
            sent.append(message.get("body", b""))
            if message.get("more_body"):
                await taken.wait()

        app = TakeTurns(routes)
        asked = [asyncio.create_task(_ask(app, "GET", "/jobs", "ann", slowly)) for _ in range(2)]
        await asyncio.sleep(0.05)
        third = asyncio.create_task(_ask(app, "GET", "/jobs", "ann"))
        await asyncio.sleep(0.05)
        assert third.done() is not held
        for _ in range(10):
            assert await _ask(app, "GET", "/jobs", "bob") == 200
        taken.set()
        assert await asyncio.gather(*asked, third) == [200] * 3
        assert b"".join(sent) == b"".join(bodies) * 2
        assert len(bodies) > 1 or max(map(len, sent)) <= 65_536

    asyncio.run(scenario())


def test_the_next_request_finds_what_the_last_one_held() -> None:
    """A client may send it as soon as it has the end of the answer."""

    async def scenario() -> None:
        turns = APP.state.service.in_progress

        async def routes(_scope: Any, _receive: Any, send: Any) -> None:
            await answer(send, b"{}")
            assert not turns._has
            await asyncio.sleep(0.01)  # whatever else the application does

        assert await _ask(TakeTurns(routes), "GET", "/jobs") == 200

    asyncio.run(scenario())
