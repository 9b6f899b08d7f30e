from __future__ import annotations

import hashlib
import logging
import multiprocessing
import os
from pathlib import Path

import pytest

from gemmsmith import Client
from gemmsmith.answers.answer import Answer
from gemmsmith.answers.cache import AnswerCache, PackCache, default_cache_dir
from gemmsmith.core.problem import Problem
from gemmsmith.errors import PackCorrupt
from gemmsmith.http.requests import Query
from tests.support.snapshots import BIG, CONTENT, PACK, row, snapshot
from tests.unit.client.misbehaving import Misbehaving, Say

URL = "http://127.0.0.1:8000"


def the_file(root: Path) -> Path:
    (path,) = root.rglob("*.json")
    return path


def test_an_answer_is_returned_for_its_own_problem_only(tmp_path: Path, answer: Answer) -> None:
    cache = AnswerCache(tmp_path, URL)
    query = Query(problem=answer.problem)
    cache.store(query, answer, '"tag"')
    entry = cache.load(query)
    assert entry is not None
    assert (entry.answer, entry.etag) == (answer, '"tag"')
    assert cache.load(Query(problem=answer.problem, exact=True)) is None
    assert cache.load(Query(problem=answer.problem, device="nvidia-h100-132sm")) is None
    assert cache.load(Query(problem=Problem(m=1, n=1, k=1))) is None
    assert AnswerCache(tmp_path, "http://elsewhere").load(query) is None
    cache.drop(query)
    cache.drop(query)
    assert cache.load(query) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b[: len(b) // 2],
        lambda b: b"",
        lambda b: b"\xff" + b,
        lambda b: b.replace(b'"format":1', b'"format":2'),
        lambda b: b.replace(b'"m":256', b'"m":512', 1),
        lambda b: b.replace(b'"m":256', b'"m":-1'),
        lambda b: b"[]",
    ],
)
def test_a_damaged_entry_is_a_miss_and_is_replaced(tmp_path: Path, answer: Answer, damage) -> None:
    cache = AnswerCache(tmp_path, URL)
    query = Query(problem=answer.problem)
    cache.store(query, answer, None)
    path = the_file(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert path.read_bytes() != whole
    assert cache.load(query) is None
    cache.store(query, answer, None)
    assert cache.load(query) is not None


ODD = {
    "nested": lambda path: path.write_bytes(b'{"answer":' + b"[" * 200_000),
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "link": lambda path: path.symlink_to(path.with_suffix(".moved")),
    "dangling": lambda path: path.symlink_to("nowhere"),
    "loop": lambda path: path.symlink_to(path.name),
    "folder": Path.mkdir,
    "huge": lambda path: huge(path),
    "unreadable": lambda path: path.touch(mode=0),
}


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**42)


@pytest.mark.parametrize("odd", ODD)
def test_an_invalid_file_in_the_cache_is_a_miss(
    tmp_path: Path, server: Misbehaving, served: Say, answer: Answer, odd: str
) -> None:
    winners = snapshot(row(BIG))

    def use_all(client: Client) -> None:
        server.say(served)
        assert client.best(256, 4096, 4096) == answer
        server.say(Say(body=winners.document))
        assert client.snapshot() == winners
        server.say(Say(body=CONTENT))
        if odd != "folder":
            assert client.pack(PACK).read_bytes() == CONTENT

    with Client(server.url, cache_dir=tmp_path, retries=0) as client:
        use_all(client)
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert len(files) == (2 if odd == "folder" else 3)
        for path in files:
            path.rename(path.with_suffix(".moved"))
            ODD[odd](path)
        use_all(client)
        for path in files if odd != "folder" else ():
            assert path.read_bytes() == path.with_suffix(".moved").read_bytes()


def test_a_folder_that_cannot_be_written_costs_only_the_cache(
    tmp_path: Path, answer: Answer, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    cache = AnswerCache(blocked, URL)
    query = Query(problem=answer.problem)
    with caplog.at_level(logging.WARNING, "gemmsmith"):
        cache.store(query, answer, None)
        cache.store(query, answer, None)
    assert cache.load(query) is None
    assert len(caplog.records) == 1


def _hammer(root: str, answer: Answer, name: str) -> None:
    cache = AnswerCache(Path(root), URL)
    query = Query(problem=answer.problem)
    for _ in range(200):
        cache.store(query, answer, name * 3000)
        entry = cache.load(query)
        assert entry is not None
        assert entry.etag is not None
        assert len(set(entry.etag)) == 1, "half of one process's entry and half of another's"


def test_processes_never_see_half_an_entry(tmp_path: Path, answer: Answer) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=_hammer, args=(str(tmp_path), answer, name)) for name in "abc"
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert [path.suffix for path in tmp_path.rglob("*") if path.is_file()] == [".json"]


def test_a_pack_has_the_hash_in_its_name(tmp_path: Path) -> None:
    packs = PackCache(tmp_path)
    content = b"bytes of a pack"
    name = hashlib.sha256(content).hexdigest()
    assert packs.find(name) is None
    with pytest.raises(PackCorrupt, match="download it again"):
        packs.store(name, content[:-1])
    assert list(tmp_path.rglob("*.so")) == []
    path = packs.store(name, content)
    assert path.read_bytes() == content
    assert packs.find(name) == path
    path.write_bytes(content[:-1])
    assert packs.find(name) is None


@pytest.mark.parametrize("name", ["../../etc/passwd", "", "a/b", "abcdefgh\n", "."])
def test_only_a_hash_becomes_a_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="not a pack hash"):
        PackCache(tmp_path).path(name)


def test_cache_folder_follows_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GEMMSMITH_CACHE_DIR", raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_dir() == tmp_path / "xdg" / "gemmsmith"
    monkeypatch.setenv("GEMMSMITH_CACHE_DIR", str(tmp_path / "own"))
    assert default_cache_dir() == tmp_path / "own"
