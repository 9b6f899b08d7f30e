"""Requests as bytes on a connection of their own."""

from __future__ import annotations

import socket
from contextlib import suppress

import httpx


def connect(client: httpx.Client, source: str = "127.0.0.1") -> socket.socket:
    """A connection to the client's service, from an address of this machine."""
    place = (client.base_url.host, client.base_url.port or 80)
    return socket.create_connection(place, timeout=20, source_address=(source, 0))


def read_to_the_end(link: socket.socket) -> bytes:
    """All that comes until the other side hangs up."""
    said = bytearray()
    with suppress(ConnectionError):
        while data := link.recv(2**20):
            said += data
    return bytes(said)
