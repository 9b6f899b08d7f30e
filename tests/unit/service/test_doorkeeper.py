"""Whom the doorkeeper lets in: by key while the database is away, by the host without keys."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from service.errors import ProblemError
from service.http.access import LOCAL, Caller, Doorkeeper, Scope, UnknownKey
from tests.support.processes import until
from tests.support.serving import new_settings
from tuner.store import Store


def test_known_keys_stay_while_the_database_does_not_answer(tmp_path: Path) -> None:
    settings = new_settings(tmp_path, require_keys=True)
    with Store.open(settings.database) as store:
        _, secret = store.keys.create("ann", Scope.READ)

        def rename(before: str, after: str) -> None:
            with store.database.write() as session:
                session.execute(text(f"ALTER TABLE {before} RENAME TO {after}"))

        with Doorkeeper(store.keys, required=True, job_limit=1) as door:
            rename("api_keys", "gone")
            time.sleep(1.5)  # it has tried to read them
            assert door.admit(connection(secret), Scope.READ).name == "ann"
            with pytest.raises(UnknownKey):
                asyncio.run(door.welcome(connection("gsk_other"), Scope.READ))
            rename("gone", "api_keys")
            _, later = store.keys.create("bob", Scope.READ)
            until(lambda: knows(door, later), "the keys were not read again")


def knows(door: Doorkeeper, secret: str) -> bool:
    try:
        asyncio.run(door.welcome(connection(secret), Scope.READ))
    except UnknownKey:
        return False
    return True


def connection(secret: str, *more: tuple[bytes, bytes]) -> dict[str, Any]:
    return {"headers": [(b"authorization", b"Bearer " + secret.encode()), *more]}


def test_unknown_keys_cannot_hammer_the_database(sqlite_url: str) -> None:
    async def try_many(door: Doorkeeper) -> None:
        async def attempt(number: int) -> None:
            client = {"client": (f"10.0.{number % 250}.{number // 250}", 1)}
            with pytest.raises(UnknownKey):
                await door.welcome({**connection(f"gsk_{number}"), **client}, Scope.READ)

        await asyncio.gather(*map(attempt, range(500)))

    with (
        Store.open(sqlite_url) as store,
        Doorkeeper(store.keys, required=True, job_limit=1) as door,
    ):
        read, began = door._last_begun, time.monotonic()
        asyncio.run(try_many(door))
        assert door._last_begun - read <= 2 + 10 * (time.monotonic() - began)


def test_the_caller_is_the_key(sqlite_url: str) -> None:
    with Store.open(sqlite_url) as store:
        _, plain = store.keys.create("plain", Scope.TUNE)
        _, small = store.keys.create("small", Scope.ADMIN, job_limit=2)
        with Doorkeeper(store.keys, required=True, job_limit=9) as door:
            assert door.admit(connection(plain), Scope.READ) == Caller(
                name="plain", scopes=Scope.TUNE.included, job_limit=9
            )
            assert door.admit(connection(small), Scope.ADMIN).job_limit == 2
            cookie = (b"cookie", b"other=1; gemmsmith_key=" + plain.encode())
            assert door.admit({"headers": [cookie]}, Scope.READ).name == "plain"
            # The header wins over the cookie.
            assert door.admit(connection(small, cookie), Scope.READ).name == "small"
            with pytest.raises(UnknownKey):
                door.admit(connection("gsk_wrong", cookie), Scope.READ)


def test_judging_a_request_takes_microseconds(sqlite_url: str) -> None:
    with Store.open(sqlite_url) as store:
        _, secret = store.keys.create("ann", Scope.READ)
        with Doorkeeper(store.keys, required=True, job_limit=9) as door:
            request, times = connection(secret), []
            for _ in range(20):
                began = time.perf_counter()
                for _ in range(100):
                    door.admit(request, Scope.READ)
                times.append((time.perf_counter() - began) / 100)
    assert min(times) < 50e-6  # 2 µs on an idle machine


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:8000", "127.0.0.1", "127.8.9.1:80", "localhost", "LOCALHOST:1", "[::1]:8000"],
)
def test_without_keys_loopback_names_are_served(sqlite_url: str, host: str) -> None:
    with Store.open(sqlite_url) as store:
        door = Doorkeeper(store.keys, required=False, job_limit=9)
        assert door.admit({"headers": [(b"host", host.encode())]}, Scope.ADMIN) is LOCAL


@pytest.mark.parametrize(
    "hosts",
    [
        [b"evil.example"],
        [b"evil.example:8000"],
        [b"127.0.0.1.evil.example"],
        [b"localhost.evil.example"],
        [b"evil.example#127.0.0.1"],
        [b"testserver"],
        [b"10.0.0.1"],
        [b""],
        [],
        [b"localhost", b"evil.example"],
        [b"localhost\n"],
    ],
)
def test_without_keys_other_names_are_not(sqlite_url: str, hosts: list[bytes]) -> None:
    with Store.open(sqlite_url) as store:
        door = Doorkeeper(store.keys, required=False, job_limit=9)
        with pytest.raises(ProblemError) as caught:
            door.admit({"headers": [(b"host", host) for host in hosts]}, Scope.READ)
    assert caught.value.status == 421
    assert "GEMMSMITH_REQUIRE_KEYS=1" in caught.value.detail
