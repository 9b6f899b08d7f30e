"""A real HTTP server that misbehaves on demand, and its scripted replies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from gemmsmith import AsyncClient, Client

KINDS = pytest.mark.parametrize("kind", [Client, AsyncClient])


@dataclass
class Seen:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Say:
    """A scripted reply. `drop` breaks the connection after the body, before its announced end."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    drop: bool = False


Reply = Say | Callable[[Seen], Say]


@dataclass
class Misbehaving:
    """Sends the scripted replies in order, and repeats the last one.

    A reply may be a function of the request.
    """

    script: list[Reply] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    url: str = ""
    stop: Callable[[], None] = lambda: None

    def say(self, *replies: Reply) -> None:
        self.script[:] = replies


def never_wait(client: Client | AsyncClient) -> None:
    """Make the client repeat its requests without a wait."""

    async def sleep(_: float) -> None:
        pass

    client._sender.sleep = sleep  # type: ignore[method-assign]


def ask(
    kind: type,
    url: str,
    call: str,
    *arguments: Any,
    named: Mapping[str, Any] | None = None,
    only_first: bool = False,
    read: Callable[[Any], Any] = lambda result: result,
    **options: Any,
) -> Any:
    """What a call returns, by a client of this kind, which is closed then.

    Args:
        kind: `Client` or `AsyncClient`; `options` are its arguments.
        url: of the service.
        call: name of the method; `arguments` and `named` are its arguments.
        only_first: returns the first item of an iterator; otherwise a list of all items.
        read: reads any other result while the client is open.
    """
    options = {"retries": 0, "timeout": 5, "cache_dir": None} | options

    async def run() -> Any:
        async with AsyncClient(url, **options) as client:
            never_wait(client)
            result = getattr(client, call)(*arguments, **(named or {}))
            if not isinstance(result, AsyncIterator):
                return read(await result)
            return await anext(result) if only_first else [item async for item in result]

    if kind is AsyncClient:
        return asyncio.run(run())
    with Client(url, **options) as client:
        never_wait(client)
        result = getattr(client, call)(*arguments, **(named or {}))
        if not isinstance(result, Iterator):
            return read(result)
        return next(result) if only_first else list(result)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in the same packet, so that the client waits only once

    def setup(self) -> None:
        super().setup()
        self.server.open_sockets.append(self.connection)  # type: ignore[attr-defined]

    def _answer(self) -> None:
        owner: Misbehaving = self.server.owner  # type: ignore[attr-defined]
        length = int(self.headers.get("content-length", 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        seen = Seen(self.command, self.path, headers, self.rfile.read(length))
        owner.seen.append(seen)
        scripted = owner.script.pop(0) if len(owner.script) > 1 else owner.script[0]
        reply = scripted if isinstance(scripted, Say) else scripted(seen)
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        # A dropped reply announces more than it sends, like a service that is killed meanwhile.
        self.send_header("Content-Length", str(len(reply.body) + 1000 * reply.drop))
        self.end_headers()
        self.wfile.write(reply.body)
        self.wfile.flush()
        if reply.drop:
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True

    do_GET = do_POST = do_DELETE = _answer  # noqa: N815 - the names http.server calls

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def misbehaving() -> Iterator[Misbehaving]:
    """The server, on a free port of this machine."""
    server = Misbehaving()
    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    http.owner = server  # type: ignore[attr-defined]
    http.handle_error = lambda *_: None  # type: ignore[method-assign] # clients that hang up
    http.open_sockets = sockets = list[socket.socket]()  # type: ignore[attr-defined]
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    stopped = threading.Event()

    def stop() -> None:
        if not stopped.is_set():
            stopped.set()
            http.shutdown()
            for connection in sockets:  # also those that are kept alive
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            http.server_close()
            thread.join()

    server.url = f"http://127.0.0.1:{http.server_address[1]}"
    server.stop = stop
    yield server
    stop()


@contextmanager
def raw(talk: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that calls `talk` with every connection after a request's headers. Yields its URL.

    An error of the connection ends the call, because the client has closed it.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    connections: list[socket.socket] = []

    def serve(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            if connection.recv(65536):
                talk(connection)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connections.append(connection)
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        for connection in (listener, *connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        thread.join()


NOT_TUNED = Say(
    404,
    json.dumps(
        {
            "type": "urn:gemmsmith:problem:not-tuned",
            "title": "Not tuned yet",
            "status": 404,
            "detail": "POST /tune",
        }
    ).encode(),
    {"Content-Type": "application/problem+json"},
)
UNAVAILABLE = Say(503, b'{"title": "Busy", "detail": "later"}', {"Retry-After": "0"})
SLOW_DOWN = Say(429, b'{"title": "Slow down", "detail": "later"}', {"Retry-After": "1000"})


def job(state: str, **more: Any) -> Say:
    body = {
        "id": "j1",
        "state": state,
        "effort": "default",
        "problem": {"m": 256, "n": 4096, "k": 4096},
    }
    return Say(202, json.dumps(body | more).encode())


def stream(*events: tuple[int, str, dict[str, Any]], drop: bool = False) -> Say:
    text = "".join(f"id: {i}\nevent: {k}\ndata: {json.dumps(d)}\n\n" for i, k, d in events)
    return Say(200, text.encode(), {"Content-Type": "text/event-stream"}, drop)
