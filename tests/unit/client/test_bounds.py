"""Limits on what a client reads from a service or a file: size, decompression, pages, events."""

from __future__ import annotations

import gzip
import json
import tracemalloc
import zipfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from gemmsmith import (
    Answer,
    AsyncClient,
    Bounds,
    Bundle,
    Client,
    PackCorrupt,
    Problem,
    ServiceFault,
    ServiceUnavailable,
)
from gemmsmith.winners.bundle import write_bundle
from tests.support.snapshots import BIG, CONTENT, PACK, row, snapshot
from tests.unit.client.misbehaving import Misbehaving, Say, job, stream
from tests.unit.client.misbehaving import ask as ask_with


@cache
def bomb() -> bytes:
    """130 KB that decompress to 128 MiB."""
    return gzip.compress(bytes(2**27), 9)


LEAST = 2**25
"""Memory in bytes that handling a bomb may take, whatever its decompressed size."""


Ask = Callable[..., Any]


@pytest.fixture(params=[Client, AsyncClient])
def ask(request: pytest.FixtureRequest, server: Misbehaving) -> Ask:
    return partial(ask_with, request.param, server.url)


def test_an_answer_may_come_compressed(ask: Ask, server: Misbehaving, served: Say, answer) -> None:
    server.say(Say(body=gzip.compress(served.body), headers={"Content-Encoding": "gzip"}))
    assert ask("best", 256, 4096, 4096) == answer
    assert server.seen[0].headers["accept-encoding"] == "gzip"


@pytest.mark.parametrize(
    ("call", "bound"),
    [
        (("best", 256, 4096, 4096), "answer_bytes"),
        (("devices",), "answer_bytes"),
        (("jobs",), "answer_bytes"),
        (("job_status", "j1"), "answer_bytes"),
        (("snapshot",), "snapshot_bytes"),
        (("pack", "0" * 64), "pack_bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_a_compressed_bomb_is_refused_and_not_kept(
    ask: Ask, server: Misbehaving, call: tuple[Any, ...], bound: str
) -> None:
    server.say(Say(body=bomb(), headers={"Content-Encoding": "gzip"}))
    tracemalloc.start()
    try:
        with pytest.raises(ServiceFault, match=rf"bounds=Bounds\({bound}="):
            ask(*call, bounds=Bounds(snapshot_bytes=2**22, pack_bytes=2**22))
        assert tracemalloc.get_traced_memory()[1] < 2 * LEAST
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("status", [200, 404, 503])
def test_a_body_that_is_too_long_is_refused_before_it_is_read(
    ask: Ask, server: Misbehaving, status: int
) -> None:
    server.say(Say(status, b"x" * 5000))
    with pytest.raises(ServiceFault, match="answer_bytes=4999"):
        ask("devices", bounds=Bounds(answer_bytes=4999))


@pytest.mark.parametrize("encoding", ["gzip, gzip", "zstd", "br", "x-own"])
def test_no_other_encoding_is_decompressed(ask: Ask, server: Misbehaving, encoding: str) -> None:
    server.say(Say(body=gzip.compress(bomb()), headers={"Content-Encoding": encoding}))
    with pytest.raises(ServiceFault, match="was not asked for"):
        ask("devices")
    server.say(Say(body=bomb(), headers={"Content-Encoding": encoding}), job("running"))
    with pytest.raises(ServiceUnavailable):
        ask("job_events", "j1")


@pytest.mark.parametrize(
    "cut",
    [b"not gzip at all", gzip.compress(b'{"devices":[]}' * 99, mtime=0)[:-9]],
    ids=["none", "truncated"],
)
def test_broken_compression_is_no_answer(ask: Ask, server: Misbehaving, cut: bytes) -> None:
    server.say(Say(body=cut, headers={"Content-Encoding": "gzip"}))
    with pytest.raises(ServiceUnavailable):
        ask("devices")


def test_the_cached_answer_replaces_a_refused_answer(
    ask: Ask, server: Misbehaving, served: Say, answer: Answer, tmp_path: Path
) -> None:
    server.say(served)
    assert ask("best", 256, 4096, 4096, cache_dir=tmp_path) == answer
    server.say(Say(body=bomb(), headers={"Content-Encoding": "gzip"}))
    assert ask("best", 256, 4096, 4096, cache_dir=tmp_path) == answer


def page(following: str) -> Say:
    listed = json.loads(job("done").body)
    links = {"next": {"href": following}}
    return Say(body=json.dumps({"jobs": [listed], "links": links}).encode())


def test_a_page_that_links_back_ends_the_list(ask: Ask, server: Misbehaving) -> None:
    server.say(page("/jobs?after=7"), page("/jobs?after=8"), page("/jobs?after=7"))
    with pytest.raises(ServiceFault, match="links back"):
        ask("jobs")
    assert len(server.seen) == 3
    server.say(page("/jobs?limit=200"))
    with pytest.raises(ServiceFault, match="links back"):
        ask("jobs")


def test_the_number_of_pages_is_limited(ask: Ask, server: Misbehaving) -> None:
    server.say(*(page(f"/jobs?after={number}") for number in range(9)))
    with pytest.raises(ServiceFault, match=r"pages=5.*bounds=Bounds\(pages="):
        ask("jobs", bounds=Bounds(pages=5))
    assert len(server.seen) == 5


@pytest.mark.parametrize("piece", ["x" * 100, "data: x\n" * 20], ids=["line", "lines"])
def test_an_event_that_does_not_end_is_refused(ask: Ask, server: Misbehaving, piece: str) -> None:
    first = stream((1, "started", {}))
    server.say(Say(200, first.body + piece.encode() * 10_000, first.headers))
    with pytest.raises(ServiceFault, match="an event of job j1 exceeds event_bytes=65536"):
        ask("job_events", "j1", bounds=Bounds(event_bytes=65536))


def test_deeply_nested_json_is_refused(ask: Ask, server: Misbehaving) -> None:
    server.say(Say(body=b"[" * 200_000))
    for call in (("devices",), ("jobs",), ("job_status", "j1"), ("snapshot",)):
        with pytest.raises(ServiceFault, match="Unreadable"):
            ask(*call)
    server.say(Say(body=b'{"format":1,"device":"d","revision":"r","winners":' + b"[" * 200_000))
    with pytest.raises(ServiceFault, match="Unreadable"):
        ask("snapshot")


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "9"])
def test_a_bound_is_a_positive_integer(wrong: Any) -> None:
    with pytest.raises(ValueError, match="pages must be a positive integer"):
        Bounds(pages=wrong)


@pytest.fixture
def baked(tmp_path: Path) -> Path:
    (tmp_path / "pack.so").write_bytes(CONTENT)
    path = tmp_path / "winners.gspack"
    write_bundle(path, snapshot(row(BIG)), {PACK: tmp_path / "pack.so"})
    return path


@pytest.mark.parametrize("bomb", ["snapshot.json", f"packs/{PACK}.so", "other"])
def test_nothing_in_a_bundle_is_compressed(baked: Path, bomb: str) -> None:
    with zipfile.ZipFile(baked) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(baked, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in ({**members, bomb: bytes(2**27)}).items():
            how = zipfile.ZIP_DEFLATED if name == bomb else zipfile.ZIP_STORED
            archive.writestr(name, content, how)
    tracemalloc.start()
    try:
        with pytest.raises(PackCorrupt, match="more than its own size"):
            Bundle.open(baked)
        assert tracemalloc.get_traced_memory()[1] < LEAST
    finally:
        tracemalloc.stop()


def test_members_of_a_bundle_do_not_share_their_bytes(baked: Path) -> None:
    with zipfile.ZipFile(baked, "a") as archive:
        large = zipfile.ZipInfo("a")
        archive.writestr(large, bytes(50_000))
        for number in range(3):
            twin = zipfile.ZipInfo(f"a{number}")
            twin.header_offset, twin.CRC = large.header_offset, large.CRC
            twin.file_size = twin.compress_size = large.file_size
            archive.filelist.append(twin)
            archive.NameToInfo[twin.filename] = twin
    with pytest.raises(PackCorrupt, match="more than its own size"):
        Bundle.open(baked)


def test_a_bundles_members_are_bounded(
    baked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEMMSMITH_UNSIGNED", "1")
    with pytest.raises(PackCorrupt, match=r"snapshot\.json of .* exceeds snapshot_bytes=9"):
        Bundle.open(baked, bounds=Bounds(snapshot_bytes=9))
    bundle = Bundle.open(baked, folder=tmp_path, bounds=Bounds(pack_bytes=9))
    with pytest.raises(PackCorrupt, match="exceeds pack_bytes=9"):
        bundle.packs.path(PACK)
    assert bundle.snapshot.find(Problem(m=1, n=1, k=1)) is None
