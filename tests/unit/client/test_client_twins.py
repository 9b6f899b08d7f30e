"""Both clients have the same calls, arguments, requests and results."""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
from functools import partial
from typing import Any

import msgspec
import pytest

from gemmsmith import (
    Answer,
    AsyncClient,
    AsyncTuningJob,
    Client,
    GemmsmithError,
    JobStatus,
    Problem,
    TunedAnswer,
    TuningJob,
)
from gemmsmith.signing import PublicKey
from tests.support.snapshots import CONTENT, PACK, row, snapshot
from tests.unit.client.misbehaving import Misbehaving, Say, ask, job, misbehaving, stream

H200 = "nvidia-h200-132sm"
PROBLEM = Problem(256, 4096, 4096)
STATUS: dict[str, Any] = json.loads(job("done").body)
EVENTS = stream((1, "progress", {"done": 1}), (2, "finished", {}))
SIZE = (256, 4096, 4096)


def body(**document: Any) -> Say:
    return Say(body=json.dumps(document).encode())


def rows(name: str) -> tuple[Say, Say]:
    links = {"next": {"href": f"/{name}?after=2"}}
    return body(**{name: [{"id": 1}, {"id": 2}]}, links=links), body(**{name: [{"id": 3}]})


def calls(answer: Answer) -> dict[str, tuple[tuple[Any, ...], dict[str, Any], tuple[Say, ...]]]:
    """The arguments and options of every call, and the service's replies."""
    known: dict[str, Any] = msgspec.to_builtins(answer)
    revision = {"answer": known, "origin": "measured", "current": True}
    served, chosen = body(**known), body(**revision)
    status = JobStatus(id="j1", state="done", problem=PROBLEM)  # type: ignore[arg-type]
    device = known["device"]
    return {
        "best": (SIZE, {"device": H200, "exact": True}, (Say(503), served)),
        "best_many": (([PROBLEM],), {}, (body(answers=[known]),)),
        "tune": (SIZE, {"wait": True, "calls": 96}, (job("waiting"), EVENTS, job("done"), served)),
        "job": (("j1",), {}, (job("running"),)),
        "job_status": (("j1",), {}, (job("running"),)),
        "cancel": (("j1",), {}, (job("cancelled"),)),
        "retry": (("j1",), {}, (job("waiting"),)),
        "jobs": ((), {"state": "done", "limit": 1}, (body(jobs=[STATUS]),)),
        "devices": ((), {}, (body(devices=[device]),)),
        "snapshot": ((H200,), {}, (Say(body=snapshot(row(PROBLEM)).document),)),
        "history": ((PROBLEM,), {"limit": 2}, (body(revisions=[revision]),)),
        "explain": ((PROBLEM,), {}, (body(problem=known["problem"], why="it is faster"),)),
        "pin": ((PROBLEM, 1), {"device": H200}, (chosen,)),
        "unpin": ((PROBLEM,), {}, (chosen,)),
        "rollback": ((PROBLEM,), {}, (chosen,)),
        "results": ((), {"dtype": "bf16"}, rows("trials")),
        "packs": ((), {"toolchain": "x"}, rows("packs")),
        "pack": ((PACK,), {}, (Say(body=CONTENT),)),
        "signing_key": ((), {}, (body(key=PublicKey(raw=bytes(32)).line),)),
        "winner_of": ((status,), {"device": H200}, (served,)),
        "job_events": (("j1",), {"after": "0"}, (EVENTS,)),
    }


def methods(kind: type) -> set[str]:
    return {
        name
        for name, member in inspect.getmembers(kind, callable)
        if not name.startswith("_") and name != "close"
    }


CALLS = sorted(methods(AsyncClient))


def comparable(result: Any) -> Any:
    """A form of a result that can be compared."""
    if isinstance(result, TuningJob | AsyncTuningJob):
        return result.status
    return result.read_bytes() if hasattr(result, "read_bytes") else result


result_of = partial(ask, read=comparable, retries=1)


def test_no_call_is_missing(answer: Answer) -> None:
    assert methods(Client) - methods(AsyncClient) == {"pack_bytes"}
    assert methods(TuningJob) == methods(AsyncTuningJob)
    assert set(calls(answer)) == methods(AsyncClient)


@pytest.mark.parametrize(("sync", "twin"), [(Client, AsyncClient), (TuningJob, AsyncTuningJob)])
def test_arguments_and_documentation_are_the_same(sync: type, twin: type) -> None:
    for name in methods(twin):
        assert inspect.signature(getattr(sync, name)) == inspect.signature(getattr(twin, name))
        assert getattr(sync, name).__doc__ == getattr(twin, name).__doc__


@pytest.mark.parametrize("call", CALLS)
def test_requests_and_results_are_the_same(call: str, answer: Answer) -> None:
    arguments, options, replies = calls(answer)[call]
    results, seen = [], []
    for kind in (Client, AsyncClient):
        with misbehaving() as server:
            server.say(*replies)
            results.append(result_of(kind, server.url, call, *arguments, named=options))
            assert len(server.script) == 1, "every reply was read"
            for request in server.seen:
                request.headers = {
                    name: text
                    for name, text in request.headers.items()
                    if name not in ("host", "idempotency-key")
                }
            seen.append(server.seen)
    assert results[0] == results[1]
    assert seen[0] == seen[1]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("status", [302, 403, 404, 500])
def test_errors_are_the_same(call: str, status: int, server: Misbehaving, answer: Answer) -> None:
    arguments, options, _ = calls(answer)[call]
    server.say(Say(status, json.dumps({"title": "Odd", "detail": "no"}).encode()))
    errors = []
    for kind in (Client, AsyncClient):
        with pytest.raises(GemmsmithError) as caught:
            result_of(kind, server.url, call, *arguments, named=options)
        errors.append((type(caught.value), str(caught.value)))
    assert errors[0] == errors[1]


def test_a_handle_does_the_same(server: Misbehaving, answer: Answer) -> None:
    served = calls(answer)["winner_of"][2][0]
    script = (job("waiting"), EVENTS, job("done"), served, job("failed"), EVENTS, job("waiting"))
    server.say(*script)
    with Client(server.url, cache_dir=None) as client:
        handle = client.tune(*SIZE)
        assert handle.wait() == TunedAnswer.of(answer, answer)
        assert handle.refresh().state == "failed"
        assert [event.id for event in handle.events()] == ["1", "2"]
        again = handle.retry()
        assert type(again) is TuningJob
        assert again.cancel() == again.status

    async def go() -> None:
        async with AsyncClient(server.url, cache_dir=None) as client:
            handle = await client.tune(*SIZE)
            assert await handle.wait() == TunedAnswer.of(answer, answer)
            assert (await handle.refresh()).state == "failed"
            assert [event.id async for event in handle.events()] == ["1", "2"]
            again = await handle.retry()
            assert type(again) is AsyncTuningJob
            assert await again.cancel() == again.status

    server.say(*script)
    asyncio.run(go())


def test_a_blocking_client_works_beside_an_event_loop(server: Misbehaving, answer: Answer) -> None:
    """Cells of a notebook run in an event loop. An unfinished iterator leaves nothing open."""

    async def go() -> None:
        for call, (arguments, options, replies) in calls(answer).items():
            server.say(*replies)
            result_of(Client, server.url, call, *arguments, named=options)
        with Client(server.url, cache_dir=None) as client:
            server.say(EVENTS)
            events = client.job_events("j1")
            assert next(events) is not None
            server.say(*rows("trials"))
            results = client.results()
            assert next(results) == {"id": 1}
            del events, results
            gc.collect()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(go())
