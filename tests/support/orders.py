"""A user who requests tuning jobs and reads answers while the service is killed and restarted."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from random import Random
from typing import Any
from urllib.parse import urlencode

import httpx
import msgspec

from gemmsmith.core.problem import Problem
from tests.support.shipped import SLUG, recorded_problems


def distinct_orders(count: int, random: Random) -> list[dict[str, Any]]:
    """Requests that do not join each other: recorded problems × efforts × devices, shuffled."""
    orders = [
        {**msgspec.to_builtins(problem), "effort": effort, "device": device}
        for effort in ("quick", "default")
        for device in ("", SLUG)
        for problem in recorded_problems()
    ]
    return random.sample(orders, count)


def accepted(
    client: httpx.Client, order: dict[str, Any], key: str, patience_s: float = 90.0
) -> str:
    """Send the request until it is accepted. Returns the job's identifier."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            reply = client.post("/tune", json=order, headers={"Idempotency-Key": key})
        except httpx.TransportError:
            reply = None
        if reply is not None and reply.status_code in (200, 202):
            return str(reply.json()["id"])
        assert reply is None or is_busy(reply), reply.text
        assert time.monotonic() < deadline, "the service stays away"
        time.sleep(0.1)


def lookup(problem: Problem) -> str:
    """The path of a lookup of this problem."""
    return f"/best?{urlencode(msgspec.to_builtins(problem))}"


def is_busy(reply: httpx.Response) -> bool:
    """Whether the service is busy, and says when to try again."""
    return reply.status_code == 503 and reply.headers["Retry-After"].isdecimal()


class Reader:
    """A thread that looks up winners and lists jobs; use it as a context manager.

    Args:
        jobs: whether to list jobs.

    Attributes:
        slowest_s: time of the slowest answer in seconds.
        wrong: answers that were neither a success nor a 404 with the call of `tune`.
    """

    def __init__(
        self, url: str, problems: Sequence[Problem], *, jobs: bool = True, pause_s: float = 0.05
    ) -> None:
        self.answers = 0
        self.slowest_s = 0.0
        self.wrong: list[str] = []
        self._url = url
        self._problems = problems
        self._listings = ("/jobs?limit=5",) if jobs else ()
        self._pause_s = pause_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> Reader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _read(self) -> None:
        turn = 0
        with httpx.Client(base_url=self._url, timeout=30) as client:
            while not self._over.wait(self._pause_s):
                problem = self._problems[turn % len(self._problems)]
                turn += 1
                for path in (lookup(problem), *self._listings):
                    self._ask(client, path)

    def _ask(self, client: httpx.Client, path: str) -> None:
        began = time.monotonic()
        try:
            reply = client.get(path)
        except httpx.TransportError:
            return  # it has just been killed
        self.answers += 1
        self.slowest_s = max(self.slowest_s, time.monotonic() - began)
        if reply.status_code not in (200, 404):
            self.wrong.append(f"{path}: {reply.status_code} {reply.text}")
