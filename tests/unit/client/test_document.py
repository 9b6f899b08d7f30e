"""Documents of snapshots: written and read to the byte, and always requested whole."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmsmith import AsyncClient, Client, Snapshot, SnapshotCorrupt, Use
from gemmsmith.answers import document
from gemmsmith.answers.snapshot import Row
from tests.support.snapshots import BIG, H200, row, snapshot
from tests.unit.client.misbehaving import Misbehaving, Say

rows = st.lists(st.integers(0, 30), unique=True).map(
    lambda numbers: [b'{"number":%d,"of":"a newer service"}' % n for n in sorted(numbers)]
)


def written(lines: Sequence[bytes]) -> tuple[bytes, document.Head]:
    """The document and its head."""
    head = document.Head.of(H200, lines)
    return b"".join(document.whole(head, lines)), head


@given(lines=rows)
def test_a_document_is_read_as_it_was_written(lines: list[bytes]) -> None:
    content, head = written(lines)
    assert document.length_of(head, lines) == len(content)
    assert document.read(content).revision == head.revision
    assert list(map(bytes, document.read(content).rows)) == lines


def encoded(winners: Sequence[Row]) -> list[bytes]:
    return [msgspec.json.encode(winner) for winner in sorted(winners, key=lambda r: r.problem)]


def test_a_document_of_nothing_but_commas_is_not_taken_apart() -> None:
    many, _ = written([b"{}"] * 1000)
    with pytest.raises(SnapshotCorrupt, match="more of them than fit"):
        Snapshot.parse(many)


ROWS = [row(BIG), row(replace(BIG, m=64), use=Use.CUBLAS), row(replace(BIG, m=128))]
LATER = [ROWS[0], row(replace(BIG, m=64)), row(replace(BIG, m=100)), ROWS[2]]
OLD, NEW = written(encoded(ROWS))[0], snapshot(*LATER).document


def refreshed(server: Misbehaving, kind: type[Client] | type[AsyncClient]) -> list[Snapshot]:
    """The first snapshot, and what a refresh makes of it."""

    async def both() -> list[Snapshot]:
        async with AsyncClient(server.url, retries=0, cache_dir=None) as client:
            first = await client.snapshot(H200)
            return [first, await client.snapshot(H200, known=first)]

    if kind is AsyncClient:
        return asyncio.run(both())
    with Client(server.url, retries=0, cache_dir=None) as client:
        first = client.snapshot(H200)
        return [first, client.snapshot(H200, known=first)]


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("offered", [{}, {"Gemmsmith-Since": "none"}], ids=["now", "earlier"])
def test_a_refresh_names_the_known_tag_and_takes_the_whole(
    server: Misbehaving, kind: type[Client] | type[AsyncClient], offered: dict[str, str]
) -> None:
    """Also of a service that offers to send changes, as those of earlier releases do."""
    server.say(Say(200, OLD, offered), Say(200, NEW, offered))
    assert [each.document for each in refreshed(server, kind)] == [OLD, NEW]
    assert [seen.path.partition("?")[2] for seen in server.seen] == [f"device={H200}"] * 2
    assert server.seen[1].headers["if-none-match"] == f'"{Snapshot.parse(OLD).tag}"'
    server.say(Say(200, OLD, offered), Say(304, headers=offered))
    first, second = refreshed(server, kind)
    assert first is second
