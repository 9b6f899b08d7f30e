"""What comes over a raw socket: endless heads, long URLs, what is not HTTP, paths that climb."""

from __future__ import annotations

import contextlib
import json
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.http.bodies import SMALL_BYTES
from service.http.protocol import MAX_HEAD_BYTES, MAX_HEADERS, MAX_URL_BYTES
from service.settings import Settings
from tests.support.wire import connect, read_to_the_end


def exchange(client: httpx.Client, *pieces: bytes) -> tuple[int, bytes]:
    """Send the pieces, then read to the end: the status, and the body."""
    with connect(client) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # It may hang up before it has read everything; what it answered is in the buffer.
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                link.sendall(piece)
        said = read_to_the_end(link)
    head, _, body = said.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 "), head[:100]
    return int(head.split(b" ")[1]), body


def request(path: str, *headers: str) -> bytes:
    lines = [f"GET {path} HTTP/1.1", "Host: 127.0.0.1", "Connection: close", *headers, "", ""]
    return "\r\n".join(lines).encode()


def refused(status: int, body: bytes, expected: int) -> None:
    document: dict[str, Any] = json.loads(body)
    assert status == document["status"] == expected
    assert document["type"].startswith("urn:gemmsmith:problem:")


def test_as_much_as_is_allowed_passes(client: httpx.Client) -> None:
    path = "/healthz?" + "x" * (MAX_URL_BYTES - len("/healthz?"))
    assert exchange(client, request(path))[0] == 200
    many = [f"X-{i}: {'y' * 1000}" for i in range(MAX_HEAD_BYTES // 1100)]
    assert exchange(client, request("/healthz", *many))[0] == 200
    assert exchange(client, request("/healthz", *["a:"] * (MAX_HEADERS - 2)))[0] == 200


@pytest.mark.parametrize("length", [MAX_URL_BYTES + 1, 30_000, 200_000])
def test_a_long_url_is_refused(client: httpx.Client, length: int) -> None:
    status, body = exchange(client, request("/healthz?".ljust(length, "x")))
    refused(status, body, 414)
    assert str(MAX_URL_BYTES) in body.decode()


@pytest.mark.parametrize(
    "headers",
    [
        [f"X-Big: {'y' * MAX_HEAD_BYTES}"],
        [f"X-{'y' * MAX_HEAD_BYTES}: big"],
        [f"X-{i}: {'y' * 1000}" for i in range(MAX_HEAD_BYTES // 1000 + 1)],
        [f"X{i}: 1" for i in range(MAX_HEAD_BYTES // 4)],
        ["a:"] * MAX_HEADERS,
        ["a:"] * 60_000,
    ],
)
def test_large_headers_are_refused(client: httpx.Client, headers: list[str]) -> None:
    status, body = exchange(client, request("/healthz", *headers))
    refused(status, body, 431)
    assert str(MAX_HEAD_BYTES) in body.decode()


@pytest.mark.parametrize(
    ("start", "piece", "expected"),
    [
        (b"GET /healthz HTTP/1.1\r\nX-Endless: ", b"y" * 4096, 431),
        (b"GET /healthz HTTP/1.1\r\n", b"X-Many: 1\r\n" * 400, 431),
        (b"GET /", b"x" * 4096, 414),
    ],
)
def test_a_head_without_end_is_cut_off(
    client: httpx.Client, start: bytes, piece: bytes, expected: int
) -> None:
    # Far more than is allowed, and no end of the head in it: only a limit can answer.
    status, body = exchange(client, start, *[piece] * 1000)
    refused(status, body, expected)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS spoken to a plain port
        b"hello\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: \x00\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"POST /tune HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /tune HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST /tune HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\nabcde",
        b"POST /tune HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org\r\n\r\n",
    ],
)
def test_what_is_not_http_gets_a_problem_document(client: httpx.Client, sent: bytes) -> None:
    status, body = exchange(client, sent)
    refused(status, body, 400)
    assert client.get("/healthz").status_code == 200


def test_a_large_body_does_not_count_as_a_head(client: httpx.Client, settings: Settings) -> None:
    filler = " " * (settings.max_body_bytes - 100)
    reply = client.post(
        "/best:batch",
        content='{"problems": [{"m": 1, "n": 1, "k": 1}]' + filler + "}",
        headers={"Content-Type": "application/json"},
    )
    assert reply.status_code == 200


def test_a_second_request_on_the_connection_is_judged_afresh(client: httpx.Client) -> None:
    many = [f"X-{i}: {'y' * 1000}" for i in range(20)]
    first = request("/healthz", *many).replace(b"Connection: close\r\n", b"")
    status, body = exchange(client, first, first, request("/healthz", *many))
    assert status == 200
    assert body.count(b"HTTP/1.1 200") == 2  # the two that follow


def test_a_declared_body_that_is_too_large_is_not_waited_for(client: httpx.Client) -> None:
    head = f"POST /tune HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {10**12}\r\n\r\n"
    status, body = exchange(client, head.encode())
    refused(status, body, 413)
    assert str(SMALL_BYTES) in body.decode()


@pytest.mark.parametrize("sent", [b"1\r\n \r\n" * 40_000, b"0\r\n" + b"a: b\r\n" * 10_000])
def test_chunks_and_trailers_that_cost_more_than_they_bring_are_refused(
    client: httpx.Client, sent: bytes
) -> None:
    head = b"POST /tune HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    status, body = exchange(client, head + sent)
    refused(status, body, 431 if sent.startswith(b"0") else 400)


def test_a_body_in_small_chunks_is_a_body_all_the_same(client: httpx.Client) -> None:
    body = b'{"problems": [{"m": 1, "n": 1, "k": 1}]}'
    head = (
        b"POST /best:batch HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    assert exchange(client, head + chunks + b"0\r\n\r\n")[0] == 200


def test_only_so_many_requests_are_taken_before_the_first_is_answered(
    client: httpx.Client,
) -> None:
    ahead = request("/healthz").replace(b"Connection: close\r\n", b"")
    _, body = exchange(client, ahead * 20 + request("/healthz"))
    assert body.count(b"HTTP/1.1 200") == 20
    with connect(client) as link, contextlib.suppress(ConnectionError):
        link.sendall(ahead * 5000)
        while link.recv(65536):
            pass  # hung up on, sooner or later
    assert client.get("/healthz").status_code == 200


def test_a_body_without_end_is_cut_off(client: httpx.Client) -> None:
    head = b"POST /tune HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    status, body = exchange(client, head, *[chunk] * 200)
    refused(status, body, 413)


def test_expected_bodies_are_refused_before_they_are_sent(client: httpx.Client) -> None:
    head = (
        "POST /tune HTTP/1.1\r\nHost: 127.0.0.1\r\nExpect: 100-continue\r\n"
        f"Content-Length: {10**9}\r\n\r\n"
    )
    status, body = exchange(client, head.encode())
    refused(status, body, 413)


CLIMBS = (
    "/packs/../../etc/passwd",
    "/packs/..%2f..%2fetc%2fpasswd",
    "/packs/%2e%2e/%2e%2e/etc/passwd",
    "/packs/..\\..\\etc\\passwd",
    "/packs/%2fetc%2fpasswd",
    "/packs//etc/passwd",
    "/packs/....//....//etc/passwd",
    "/packs/%252e%252e%252fetc%252fpasswd",
    "/packs/..;/etc/passwd",
    "/packs/" + "a" * 64 + "/../../secret.txt",
    "/packs/" + "a" * 64 + "%00.so",
    "/packs/" + "A" * 64,
    "/ui/static/../secret.txt",
    "/ui/static/../../app.py",
    "/ui/static/..%2f..%2fapp.py",
    "/ui/static/%2e%2e/app.py",
    "/ui/static/..%5c..%5capp.py",
    "/ui/static//etc/passwd",
    "/ui/static/%2fetc%2fpasswd",
    "/kernels/../../etc/passwd",
    "/../../etc/passwd",
)


@pytest.mark.parametrize("path", CLIMBS)
def test_no_path_leads_out(client: httpx.Client, settings: Settings, path: str) -> None:
    for folder in (settings.packs, settings.packs.parent):
        (folder / "secret.txt").write_text("root:secret")
    status, body = exchange(client, request(path))  # raw: clients would tidy the path up
    assert status in (400, 404, 422)
    assert b"root:" not in body
    assert b"create_app" not in body


def test_a_link_in_the_packs_folder_that_leads_out_is_not_followed(
    client: httpx.Client, settings: Settings
) -> None:
    outside = settings.packs.parent / "outside.so"
    outside.write_bytes(b"root:secret")
    name = "b" * 64
    for place in (settings.packs / f"{name}.so", settings.packs / name):
        with contextlib.suppress(FileExistsError):
            Path(place).symlink_to(outside)
    reply = client.get(f"/packs/{name}")
    assert reply.status_code == 404
    assert b"root:" not in reply.content
