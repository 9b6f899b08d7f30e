"""Sends requests and receives replies. Each call here is a single attempt.

The calls of this library are coroutines that await nothing but methods of a sender. Those of a
`Sender` block, and no event loop is needed. With an `AsyncSender`, the caller's event loop runs the
calls.

An attempt ends at its deadline (`gemmsmith.http.deadline`). A failure of the network or of the
other side does not raise: the reply is a `NoAnswer` with the reason.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from functools import partial
from typing import Any, TypeVar, cast

import httpx

from gemmsmith.core.bounds import BOUNDS
from gemmsmith.http.bodies import BoundedBody
from gemmsmith.http.deadline import LATE, Clock, Deadline, TimedBackend
from gemmsmith.http.replies import NoAnswer, Reply
from gemmsmith.http.requests import Request, get
from gemmsmith.http.transport import OfProcess, Setup
from gemmsmith.showing import line

T = TypeVar("T")

_FAILED = (httpx.RequestError, httpx.InvalidURL, TimeoutError, UnicodeError)
"""Exceptions of a failed attempt. httpx raises RequestError, asyncio TimeoutError; a redirect to an
impossible host raises InvalidURL or UnicodeError."""


class Sender:
    """Sends a client's requests. Threads may share it; each process has its own connections."""

    def __init__(self, setup: Setup, transport: Any = None) -> None:
        self._setup = setup
        self._clock = Clock()
        self._client = OfProcess(partial(self._connected, setup, transport, self._clock))
        self._client()

    @property
    def http(self) -> Any:
        return self._client()

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a call and return its result."""
        try:
            # The methods of this class block and never suspend, so a single step completes the
            # whole call.
            call.send(None)
        except StopIteration as stop:
            return cast("T", stop.value)
        raise AssertionError(f"{call} waits for something else than its sender")

    def iterate(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        """Yields the items of a call."""
        try:
            while True:
                yield self.run(items.__anext__())
        except StopAsyncIteration:
            return
        finally:
            self.run(items.aclose())

    async def send(self, request: Request) -> Reply:
        """Send a request and read the whole reply."""
        limit = Deadline(self._setup.seconds(request))
        try:
            response = await self._open(request, limit)
            try:
                return await self._read(response, request, limit)
            finally:
                await self._close(response)
        except _FAILED as error:
            return _no_answer(error)

    async def stream(self, request: Request) -> AsyncGenerator[bytes | Reply, None]:
        """Yields the pieces of an event stream as they arrive.

        The last item is a reply if the answer was not a stream, or if the stream failed. The
        time-out of a whole reply limits the wait for each piece.
        """
        limit, http = Deadline(self._setup.seconds(request)), self.http
        try:
            response = await self._open(request, limit)
            try:
                if not _is_stream(response):
                    yield await self._read(response, request, limit)
                    return
                pieces = self._pieces(response)
                while self.http is http:  # a forked child stops, because its parent reads the rest
                    piece = await self._next(pieces, Deadline(self._setup.seconds(request)))
                    if piece is None:
                        return
                    yield piece
            finally:
                await self._close(response)
        except _FAILED as error:
            yield _no_answer(error)

    async def _read(self, response: httpx.Response, request: Request, limit: Deadline) -> Reply:
        headers = {name.lower(): value for name, value in response.headers.items()}
        # Transports that do not use the network may return a complete, decompressed body.
        whole = response.is_stream_consumed
        if whole:
            headers.pop("content-encoding", None)
        body = BoundedBody(response.status_code, headers, request.bound, self._setup.bounds)
        if whole:
            body.take(response.content)
            return body.reply()
        pieces = self._pieces(response)
        while (piece := await self._next(pieces, limit)) is not None:
            limit.arrived(len(piece))
            if not body.take(piece):
                break
        return body.reply()

    # The following methods block. Those of an `AsyncSender` suspend instead.

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    async def apply(self, function: Callable[..., T], *arguments: object) -> T:
        """Call a function that reads or writes large files."""
        return function(*arguments)

    @staticmethod
    def _connected(setup: Setup, transport: Any, clock: Clock) -> Any:
        if transport is None:
            transport = setup.transport(httpx.HTTPTransport)
            # httpx has no argument for a network backend, but httpcore's pool below it has.
            transport._pool._network_backend = TimedBackend(clock)
        return httpx.Client(transport=transport, **setup.options())

    async def _open(self, request: Request, limit: Deadline) -> httpx.Response:
        with self._clock.within(limit):
            sent = self.http.build_request(**self._setup.arguments(request))
            return cast("httpx.Response", self.http.send(sent, stream=True))

    def _pieces(self, response: httpx.Response) -> Any:
        return response.iter_raw()

    async def _next(self, pieces: Any, limit: Deadline) -> bytes | None:
        with self._clock.within(limit):
            return next(pieces, None)

    async def _close(self, response: httpx.Response) -> None:
        response.close()


class AsyncSender(Sender):
    """Sends with the caller's event loop.

    `run` and `iterate` return the call itself, to be awaited. Their declared types are those of
    `Sender`; `gemmsmith.http.aio` corrects them.
    """

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        return cast("T", call)

    def iterate(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        return cast("Iterator[T]", items)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def apply(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.to_thread(function, *arguments)

    @staticmethod
    def _connected(setup: Setup, transport: Any, _clock: Clock) -> Any:
        transport = transport or setup.transport(httpx.AsyncHTTPTransport)
        return httpx.AsyncClient(transport=transport, **setup.options())

    async def _open(self, request: Request, limit: Deadline) -> httpx.Response:
        async with asyncio.timeout(limit.left()):
            sent = self.http.build_request(**self._setup.arguments(request))
            return cast("httpx.Response", await self.http.send(sent, stream=True))

    def _pieces(self, response: httpx.Response) -> Any:
        return response.aiter_raw()

    async def _next(self, pieces: Any, limit: Deadline) -> bytes | None:
        async with asyncio.timeout(limit.left()):
            return await anext(pieces, None)

    async def _close(self, response: httpx.Response) -> None:
        await response.aclose()


def _is_stream(response: httpx.Response) -> bool:
    encoding = str(response.headers.get("content-encoding", "identity")).lower()
    return response.status_code == 200 and encoding == "identity"


def _no_answer(error: Exception) -> NoAnswer:
    text = LATE if isinstance(error, TimeoutError) else line(str(error))
    name = type(error).__name__
    return NoAnswer(reason=f"{name}: {text}" if text else name)


def ask(url: str, path: str, *, timeout: float) -> Reply:
    """The reply to a single GET request without a key. The server need not be a service.

    Raises:
        ValueError: not a URL.
        ServiceUnavailable: the environment's proxy cannot be used.
    """
    sender = Sender(Setup(url, False, timeout, 0, None, BOUNDS))
    with sender.http:
        return sender.run(sender.send(get(path)))
