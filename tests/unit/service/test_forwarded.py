"""Whose address a request has: the connection's, unless a proxy that is named says another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.http.attempts import AT_ONCE
from service.settings import Settings, SettingsError
from tests.support.processes import until
from tests.support.serving import new_settings, running
from tuner.store import Store
from tuner.store.audit import Action
from tuner.store.keys import Scope


@contextmanager
def keyed(folder: Path, **more: Any) -> Iterator[tuple[httpx.Client, Store, str]]:
    settings = new_settings(folder, require_keys=True, **more)
    with Store.open(settings.database) as store:
        key = store.keys.create("reader", Scope.READ)[1]
        with running(settings) as client:
            yield client, store, key


def statuses(client: httpx.Client, number: int) -> list[int]:
    """Of unknown keys, each said to come from another address."""
    return [
        client.get(
            "/jobs",
            headers={"Authorization": f"Bearer gsk_{turn}", "X-Forwarded-For": f"10.9.8.{turn}"},
        ).status_code
        for turn in range(number)
    ]


@pytest.mark.parametrize("allowed", [None, "*", "127.0.0.1"])
def test_what_a_client_says_of_its_address_counts_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: str | None
) -> None:
    if allowed is not None:
        monkeypatch.setenv("FORWARDED_ALLOW_IPS", allowed)  # uvicorn's
    with keyed(tmp_path) as (client, store, key):
        assert statuses(client, AT_ONCE + 15)[-1] == 429
        until(lambda: bool(store.audit.entries(action=Action.DENIED)), "not in the audit")
        addresses = {entry.detail["address"] for entry in store.audit.entries()[:-1]}
        assert addresses == {"127.0.0.1"}
        form = {"key": key, "next": "/"}
        done = client.post("/ui/login", data=form, headers={"X-Forwarded-Proto": "https"})
        assert "Secure" not in done.headers["set-cookie"]


@pytest.mark.parametrize("trusted", ["127.0.0.1", "10.0.0.0/8, 127.0.0.0/24 ,::1"])
def test_a_proxy_that_is_named_is_believed(tmp_path: Path, trusted: str) -> None:
    with keyed(tmp_path, trusted_proxies=trusted) as (client, _, key):
        assert 429 not in statuses(client, AT_ONCE + 15)
        form = {"key": key, "next": "/"}
        done = client.post("/ui/login", data=form, headers={"X-Forwarded-Proto": "https"})
        assert "Secure" in done.headers["set-cookie"]
        elsewhere = httpx.HTTPTransport(local_address="127.0.1.1")
        with httpx.Client(base_url=client.base_url, transport=elsewhere, timeout=20) as other:
            believed = statuses(other, AT_ONCE + 15)[-1] != 429
        assert not believed, "another address of this machine is no proxy"


@pytest.mark.parametrize("proxies", ["*", "proxy.example", "10.0.0.300", "10.0.0.1/8", "1;2"])
def test_a_proxy_is_named_by_its_address(proxies: str) -> None:
    with pytest.raises(SettingsError, match=r"GEMMSMITH_TRUSTED_PROXIES.*such as 10\.0\.0\.7") as e:
        Settings.load({"GEMMSMITH_TRUSTED_PROXIES": proxies})
    assert "\n" not in str(e.value)
