"""Sends requests and receives replies, one attempt each: `Sender`, and `AsyncSender` awaited.

An attempt ends by its deadline (`gemmsmith.http.deadline`), and never raises for what the other
side does: that is a `NoAnswer`, with the reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Iterator
from contextlib import aclosing, contextmanager

import httpx

from gemmsmith.bounds import BOUNDS, BoundedBody, Bounds
from gemmsmith.http.deadline import LATE, Deadline
from gemmsmith.http.replies import NoAnswer, Reply
from gemmsmith.http.requests import Request, get
from gemmsmith.http.transport import OfProcess, Setup
from gemmsmith.showing import line

_FAILED = (httpx.RequestError, httpx.InvalidURL, TimeoutError, UnicodeError)
"""How attempts fail. The first is httpx's, TimeoutError asyncio's; InvalidURL and UnicodeError are
those of a redirect to a host that cannot be."""


class Sender:
    """Sends for one client, whose connections are those of this process."""

    def __init__(self, setup: Setup, transport: httpx.BaseTransport | None = None) -> None:
        self._setup = setup
        self._client = OfProcess(
            lambda: httpx.Client(transport=transport or setup.transport(), **setup.options())
        )
        self._client()

    @property
    def http(self) -> httpx.Client:
        """What this process sends with."""
        return self._client()

    def send(self, request: Request) -> Reply:
        """The whole reply."""
        limit = Deadline(self._setup.seconds(request))
        try:
            with self._begun(request, limit) as response:
                return self._read(response, request, limit)
        except _FAILED as error:
            return _no_answer(error)

    def stream(self, request: Request) -> Generator[bytes | Reply, None, None]:
        """The pieces of an event stream as they come; the reply that came instead, or ended it.

        Each piece comes within the time-out of a whole reply.
        """
        limit, http = Deadline(self._setup.seconds(request)), self.http
        try:
            with self._begun(request, limit) as response:
                if not _is_stream(response):
                    yield self._read(response, request, limit)
                    return
                pieces = response.iter_raw()
                while self.http is http:  # else this is a forked process: its parent reads the rest
                    with self._setup.clock.within(Deadline(self._setup.seconds(request))):
                        piece = next(pieces, None)
                    if piece is None:
                        return
                    yield piece
        except _FAILED as error:
            yield _no_answer(error)

    @contextmanager
    def _begun(self, request: Request, limit: Deadline) -> Iterator[httpx.Response]:
        """The response as soon as its head is there."""
        with self._setup.clock.within(limit):
            sent = self.http.build_request(**self._setup.arguments(request))
            response = self.http.send(sent, stream=True)
        try:
            yield response
        finally:
            response.close()

    def _read(self, response: httpx.Response, request: Request, limit: Deadline) -> Reply:
        body = _body(response, request, self._setup.session.bounds)
        with self._setup.clock.within(limit):
            if response.is_stream_consumed:
                body.take(response.content)
                return body.reply()
            for piece in response.iter_raw():
                limit.arrived(len(piece))
                if not body.take(piece):
                    break
        return body.reply()


class AsyncSender:
    """`Sender`, awaited."""

    def __init__(self, setup: Setup, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._setup = setup
        self._client = OfProcess(
            lambda: httpx.AsyncClient(
                transport=transport or setup.async_transport(), **setup.options()
            )
        )
        self._client()

    @property
    def http(self) -> httpx.AsyncClient:
        """As `Sender.http`."""
        return self._client()

    async def send(self, request: Request) -> Reply:
        """As `Sender.send`."""
        limit = Deadline(self._setup.seconds(request))
        try:
            async with aclosing(await self._begun(request, limit)) as response:
                return await self._read(response, request, limit)
        except _FAILED as error:
            return _no_answer(error)

    async def stream(self, request: Request) -> AsyncGenerator[bytes | Reply, None]:
        """As `Sender.stream`."""
        limit = Deadline(self._setup.seconds(request))
        try:
            async with aclosing(await self._begun(request, limit)) as response:
                if not _is_stream(response):
                    yield await self._read(response, request, limit)
                    return
                pieces = response.aiter_raw()
                while True:
                    async with asyncio.timeout(self._setup.seconds(request)):
                        piece = await anext(pieces, None)
                    if piece is None:
                        return
                    yield piece
        except _FAILED as error:
            yield _no_answer(error)

    async def _begun(self, request: Request, limit: Deadline) -> httpx.Response:
        async with asyncio.timeout(limit.left()):
            sent = self.http.build_request(**self._setup.arguments(request))
            return await self.http.send(sent, stream=True)

    async def _read(self, response: httpx.Response, request: Request, limit: Deadline) -> Reply:
        body = _body(response, request, self._setup.session.bounds)
        async with asyncio.timeout(limit.left()) as timeout:
            if response.is_stream_consumed:
                body.take(response.content)
                return body.reply()
            async for piece in response.aiter_raw():
                limit.arrived(len(piece))
                timeout.reschedule(asyncio.get_running_loop().time() + limit.left())
                if not body.take(piece):
                    break
        return body.reply()


def _body(response: httpx.Response, request: Request, bounds: Bounds) -> BoundedBody:
    headers = {name.lower(): value for name, value in response.headers.items()}
    if response.is_stream_consumed:  # of a transport that is no network: whole, and unpacked
        headers.pop("content-encoding", None)
    return BoundedBody(response.status_code, headers, request.bound, bounds)


def _is_stream(response: httpx.Response) -> bool:
    encoding = str(response.headers.get("content-encoding", "identity")).lower()
    return response.status_code == 200 and encoding == "identity"


def _no_answer(error: Exception) -> NoAnswer:
    text = LATE if isinstance(error, TimeoutError) else line(str(error))
    name = type(error).__name__
    return NoAnswer(reason=f"{name}: {text}" if text else name)


def ask(url: str, path: str, *, timeout: float) -> Reply:
    """What answers one GET there, at a service that may not be one; the key stays here.

    Raises:
        ValueError: not a URL.
        ServiceUnavailable: the environment's proxy cannot be used.
    """
    setup = Setup(url, False, timeout, 0, None, BOUNDS)
    sender = Sender(setup)
    with sender.http:
        return sender.send(get(path))
