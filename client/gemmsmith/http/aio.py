"""The asynchronous client of a gemmsmith service, for asyncio.

Its methods are those of `gemmsmith.http.client`, with the same arguments, results and errors. They
run the same code with an `AsyncSender`, which returns coroutines to be awaited. Cached answers are
small files, so they are read and written directly; packs are read and stored in a thread.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, cast

import httpx

from gemmsmith.core.bounds import BOUNDS, Bounds
from gemmsmith.http.client import Client
from gemmsmith.http.handles import Handle, TuningJob
from gemmsmith.http.sending import AsyncSender
from gemmsmith.http.session import Session
from gemmsmith.http.transport import DEFAULT_TIMEOUT_S, ApiKey, CacheDir, Setup

P = ParamSpec("P")
T = TypeVar("T")


def awaited(
    call: Callable[Concatenate[Any, P], T],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Converts a method of a synchronous class for its asynchronous counterpart."""

    @wraps(call)
    async def method(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await cast("Coroutine[Any, Any, T]", call(self, *args, **kwargs))

    return method


def handled(
    call: Callable[Concatenate[Any, P], TuningJob],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, AsyncTuningJob]]:
    # `awaited` for a method that returns a handle.
    return cast("Callable[Concatenate[Any, P], Coroutine[Any, Any, AsyncTuningJob]]", awaited(call))


def iterated(
    call: Callable[Concatenate[Any, P], Iterator[T]],
) -> Callable[Concatenate[Any, P], AsyncIterator[T]]:
    # `AsyncSender.iterate` returns an asynchronous iterator: only the type has to change.
    return cast("Callable[Concatenate[Any, P], AsyncIterator[T]]", call)


class AsyncTuningJob(Handle):
    """A tuning job of the asynchronous client; the same methods as `TuningJob`, awaited."""

    refresh = awaited(TuningJob.refresh)
    cancel = awaited(TuningJob.cancel)
    retry = handled(TuningJob.retry)
    events = iterated(TuningJob.events)
    wait = awaited(TuningJob.wait)


class AsyncClient:
    """Looks up winners at a service, and requests tuning jobs; the same methods as `Client`."""

    _handle = AsyncTuningJob

    def __init__(
        self,
        url: str | None = None,
        *,
        api_key: ApiKey = None,
        timeout: float = DEFAULT_TIMEOUT_S,
        retries: int = 3,
        cache_dir: CacheDir = "default",
        bounds: Bounds = BOUNDS,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._setup = Setup(url, api_key, timeout, retries, cache_dir, bounds)
        self._sender = AsyncSender(self._setup, transport)
        self._session = Session(self._setup, self._sender)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Cached answers and packs are kept."""
        await self._sender.http.aclose()
        self._setup.cleanup()

    @property
    def url(self) -> str:
        """The service's base URL."""
        return self._setup.url

    @property
    def last_from_cache(self) -> bool:
        """Whether the last lookup came from the cache because the service could not be reached."""
        return self._session.last_from_cache

    best = awaited(Client.best)
    best_many = awaited(Client.best_many)
    tune = handled(Client.tune)
    job = handled(Client.job)
    job_status = awaited(Client.job_status)
    cancel = awaited(Client.cancel)
    retry = handled(Client.retry)
    jobs = iterated(Client.jobs)
    devices = awaited(Client.devices)
    snapshot = awaited(Client.snapshot)
    history = awaited(Client.history)
    explain = awaited(Client.explain)
    pin = awaited(Client.pin)
    unpin = awaited(Client.unpin)
    rollback = awaited(Client.rollback)
    results = iterated(Client.results)
    packs = iterated(Client.packs)
    pack = awaited(Client.pack)
    signing_key = awaited(Client.signing_key)
    winner_of = awaited(Client.winner_of)
    job_events = iterated(Client.job_events)
