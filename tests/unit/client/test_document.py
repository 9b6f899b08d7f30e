"""Deltas: from any document to any later one, to the byte, whatever the rows say."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmsmith import AsyncClient, Client, Snapshot, SnapshotCorrupt, Use
from gemmsmith.answers import document
from gemmsmith.answers.snapshot import Row
from gemmsmith.signing import Signer, Trusted
from tests.support.snapshots import BIG, CONFIG, H200, row, snapshot
from tests.unit.client.misbehaving import Misbehaving, Say

rows = st.lists(st.integers(0, 30), unique=True).map(
    lambda numbers: [b'{"number":%d,"of":"a newer service"}' % n for n in sorted(numbers)]
)


def written(
    found: Sequence[bytes], signer: Signer | None = None
) -> tuple[bytes, document.Head, str]:
    """The document, its head and its revision."""
    head = document.Head.of(H200, found, signer)
    return b"".join(document.whole(head, found)), head, head.revision


@given(before=rows, after=rows)
def test_a_delta_makes_the_later_document_to_the_byte(
    before: list[bytes], after: list[bytes]
) -> None:
    old, _, since = written(before)
    new, head, revision = written(after)
    delta = document.read_delta(document.delta(head, since, before, after))
    assert document.applied(old, delta) == new
    assert document.length_of(head, after) == len(new)
    assert document.read(new).revision == revision
    assert list(map(bytes, document.read(new).rows)) == after


def test_what_the_head_says_is_carried_along() -> None:
    """Members of the head that this library does not know are the later document's."""
    before, after = [b'{"a":1}'], [b'{"a":1}', b'{"b":2}']
    old, _, since = written(before)
    new, head, _ = written(after)
    more = head.written + b'"said_by":"somebody",'
    content = document.delta(head, since, before, after).replace(head.written, more)
    assert document.applied(old, document.read_delta(content)) == new.replace(head.written, more)


def test_a_delta_carries_the_later_documents_signature(tmp_path: Path) -> None:
    signer = Signer.create(tmp_path / "signing.key")
    before, after = encoded(ROWS), encoded(LATER)
    old, _, since = written(before, signer)
    new, head, _ = written(after, signer)
    later = Snapshot.parse(old).updated(document.delta(head, since, before, after))
    assert later.document == new
    assert later.check(Trusted([signer.public])) == signer.public


ROWS = [row(BIG), row(replace(BIG, m=64), use=Use.CUBLAS), row(replace(BIG, m=128))]
LATER = [ROWS[0], row(replace(BIG, m=64)), row(replace(BIG, m=100)), ROWS[2]]


def encoded(found: Sequence[Row], *odd: dict[str, Any]) -> list[bytes]:
    ordered = [msgspec.json.encode(each) for each in sorted(found, key=lambda r: r.problem)]
    return [*ordered, *map(msgspec.json.encode, odd)]


def delta_of(
    before: Sequence[bytes], after: Sequence[bytes], **other: Any
) -> tuple[Snapshot, bytes, bytes]:
    """A snapshot, what has become of it, and the document that it has become."""
    old, _, since = written(before)
    new, head, _ = written(after)
    delta = msgspec.json.decode(document.delta(head, since, before, after)) | other
    return Snapshot.parse(old), msgspec.json.encode(delta), new


def test_a_snapshot_is_updated() -> None:
    odd = msgspec.to_builtins(row(replace(BIG, m=2**20))) | {"use": "by a newer backend"}
    old, delta, new = delta_of(encoded(ROWS, odd), encoded(LATER, odd))
    found = old.updated(delta)
    assert found.document == new
    assert (found, found.rows, found.skipped) == (snapshot_of(new), snapshot_of(new).rows, 1)
    kept = next(each for each in found.rows if each.problem == BIG)
    assert kept is next(each for each in old.rows if each.problem == BIG)  # not read again
    last = found.updated(delta_of(encoded(LATER, odd), encoded(ROWS[:1], odd))[1])
    assert (last.rows, last.skipped) == ((ROWS[0],), 1)


def snapshot_of(content: bytes) -> Snapshot:
    return Snapshot.parse(content)


@pytest.mark.parametrize(
    "other",
    [
        {"since": "0" * 32},
        {"revision": "0" * 32},
        {"device": "nvidia-h100-132sm"},
        {"removed": [3]},
        {"removed": [-1]},
        {"removed": []},
        {"removed": "all"},
        {"added": [[-1, {}]]},
        {"added": [[9, {}]]},
        {"added": [[0, {}], [0, {}]]},
        {"added": 7},
    ],
    ids=str,
)
def test_a_wrong_delta_is_refused(other: dict[str, Any]) -> None:
    old, delta, _ = delta_of(encoded(ROWS), encoded(LATER), **other)
    with pytest.raises(SnapshotCorrupt):
        old.updated(delta)
    for content in (b"", b"[]", b"{}", delta[:-9], b"[" * 100_000):
        with pytest.raises(SnapshotCorrupt):
            old.updated(content)


def test_a_document_of_nothing_but_commas_is_not_taken_apart() -> None:
    many, _, _ = written([b"{}"] * 1000)
    with pytest.raises(SnapshotCorrupt, match="more of them than fit"):
        Snapshot.parse(many)


OLD, DELTA, NEW = delta_of(encoded(ROWS), encoded(LATER))
NONE = {"Gemmsmith-Since": "none"}
NO_SUCH_PARAMETER = Say(422, json.dumps({"title": "Invalid input", "detail": "since"}).encode())


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
def test_a_client_asks_for_what_has_changed(
    server: Misbehaving, kind: type[Client] | type[AsyncClient]
) -> None:
    since = f"device={H200}&since={OLD.revision}"
    first, changes = Say(200, OLD.document, NONE), {"Gemmsmith-Since": OLD.revision}
    cases = {
        "changed": ([first, Say(200, DELTA, changes)], [since]),
        "not known any more": ([first, Say(200, NEW, NONE)], [since]),
        "damaged": (
            [first, Say(200, DELTA[:-5] + b"]]]}}", changes), Say(200, NEW, NONE)],
            [since, f"device={H200}"],
        ),
        "an older service": (
            [first, NO_SUCH_PARAMETER, Say(200, NEW)],
            [since, f"device={H200}"],
        ),
        "never offered": ([Say(200, OLD.document), Say(200, NEW)], [f"device={H200}"]),
    }
    for name, (script, queries) in cases.items():
        server.seen.clear()
        server.say(*script)
        assert [found.document for found in refreshed(server, kind)] == [OLD.document, NEW], name
        assert [seen.path.split("?")[1] for seen in server.seen[1:]] == queries, name
    server.say(first, Say(304, headers=NONE))
    one, other = refreshed(server, kind)
    assert one is other


def test_the_rows_of_these_tests_are_such_that_something_goes_and_something_comes() -> None:
    found = msgspec.json.decode(DELTA)
    assert (found["removed"], [place for place, _ in found["added"]]) == ([0], [0, 1])
    assert CONFIG.pack is not None
    assert snapshot(*LATER).document == NEW
