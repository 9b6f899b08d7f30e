"""The library's API key: its sources, the services that get it, and where it never appears."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import pytest

from gemmsmith import AsyncClient, Client, Forbidden, Rejected, Unauthorized
from tests.unit.client.misbehaving import Misbehaving, Say

KEY = "gsk_" + "k" * 43


def refusal(status: int, title: str, detail: str) -> Say:
    body = {"type": "urn:gemmsmith:problem:x", "title": title, "status": status, "detail": detail}
    return Say(status, json.dumps(body).encode(), {"Content-Type": "application/problem+json"})


def test_the_key_goes_with_every_request(
    server: Misbehaving, served: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEMMSMITH_API_KEY", "gsk_environment")
    monkeypatch.setenv("GEMMSMITH_URL", server.url)
    server.say(served)
    with Client(server.url, api_key=KEY, cache_dir=tmp_path) as client:
        client.best(256, 4096, 4096)
    with Client(server.url, cache_dir=None) as client:
        client.best(256, 4096, 4096)
    monkeypatch.setenv("GEMMSMITH_API_KEY", "  \n")
    with Client(server.url, cache_dir=None) as client:
        client.best(256, 4096, 4096)

    async def ask() -> None:
        async with AsyncClient(server.url, api_key=KEY, cache_dir=None) as client:
            await client.best(256, 4096, 4096)

    asyncio.run(ask())
    assert [seen.headers.get("authorization") for seen in server.seen] == [
        f"Bearer {KEY}",
        "Bearer gsk_environment",
        None,
        f"Bearer {KEY}",
    ]


def test_without_a_key_the_error_says_where_to_set_it(server: Misbehaving) -> None:
    server.say(refusal(401, "API key needed", "This needs an API key."))
    with (
        Client(server.url, cache_dir=None) as client,
        pytest.raises(Unauthorized, match="api_key=, or set GEMMSMITH_API_KEY") as caught,
    ):
        client.best(256, 4096, 4096)
    assert isinstance(caught.value, Rejected)
    assert len(server.seen) == 1  # a second request would change nothing


def test_a_refused_key_is_not_answered_from_the_cache(
    server: Misbehaving, served: Say, tmp_path: Path
) -> None:
    server.say(served, refusal(401, "API key needed", "This API key is unknown."))
    with Client(server.url, api_key=KEY, cache_dir=tmp_path) as client:
        client.best(256, 4096, 4096)
        with pytest.raises(Unauthorized):
            client.best(256, 4096, 4096)


def test_a_missing_scope_is_named(server: Misbehaving) -> None:
    server.say(refusal(403, "Scope missing", "The API key 'ann' lacks the scope tune."))
    with (
        Client(server.url, api_key=KEY, cache_dir=None) as client,
        pytest.raises(Forbidden, match="lacks the scope tune"),
    ):
        client.tune(256, 4096, 4096)


def test_an_event_stream_without_a_valid_key_is_refused(server: Misbehaving) -> None:
    server.say(refusal(401, "API key needed", "This API key is unknown."))
    with Client(server.url, api_key=KEY, cache_dir=None) as client, pytest.raises(Unauthorized):
        list(client.job_events("j1"))


@pytest.mark.parametrize("key", ["", "a b", "gsk_x\r\nX-Injected: 1", "schlüssel", "x" * 501])
def test_an_invalid_key_is_refused_and_not_shown(key: str) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(ValueError, match="api_key is no API key") as caught:
            kind(api_key=key, cache_dir=None)
        assert not key or key not in str(caught.value)


def test_a_bad_key_of_the_environment_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMMSMITH_API_KEY", "two words")
    with pytest.raises(ValueError, match="GEMMSMITH_API_KEY is no API key"):
        Client(cache_dir=None)


def test_the_key_shows_nowhere(
    server: Misbehaving, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.say(refusal(500, "Broken", "no"))
    with (
        caplog.at_level(logging.DEBUG),
        Client(server.url, api_key=KEY, retries=0, cache_dir=tmp_path) as client,
    ):
        shown = [repr(client), repr(client._sender.http), repr(client._sender.http.headers)]
        for stopped in (False, True):
            if stopped:
                server.stop()
            with pytest.raises(Exception, match=r"Broken|no answer") as caught:
                client.best(256, 4096, 4096)
            shown.append(repr(caught.value))
    shown += [path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file()]
    assert KEY not in caplog.text + "".join(shown)
