"""Packs: checked against their hash and, with a key, their signature; fetched once."""

from __future__ import annotations

import multiprocessing
import threading
import time
from pathlib import Path

import pytest

from gemmsmith import PackCorrupt, PackError, Packs, PackUntrusted, ServiceUnavailable
from gemmsmith.packs import KEY_VARIABLE, key_of, sign
from tests.support.snapshots import BIG, CONTENT, PACK, row, snapshot

KEY = b"0123456789abcdef"


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


def never(pack_hash: str) -> bytes:
    raise AssertionError(f"{pack_hash} was fetched")


def gone(pack_hash: str) -> bytes:
    raise ServiceUnavailable("no answer")


def kept(folder: Path) -> list[str]:
    return [path.name for path in (folder / "packs").iterdir()]


def test_a_pack_is_fetched_once_and_then_here(tmp_path: Path) -> None:
    asked: list[str] = []

    def read(pack_hash: str) -> bytes:
        asked.append(pack_hash)
        return CONTENT

    packs = Packs(read, folder=tmp_path)
    path = packs.path(PACK)
    assert path.read_bytes() == CONTENT
    assert packs.path(PACK) == path
    assert asked == [PACK]
    assert Packs(never, folder=tmp_path).path(PACK) == path
    assert kept(tmp_path) == [f"{PACK}.so"]


@pytest.mark.parametrize("content", [CONTENT[:-1], CONTENT + b"!", b"", CONTENT.swapcase()])
def test_what_has_another_hash_is_refused_and_not_kept(tmp_path: Path, content: bytes) -> None:
    packs = Packs(lambda _: content, folder=tmp_path)
    for _ in range(2):
        with pytest.raises(PackCorrupt, match=rf"{PACK[:16]}.*{len(content)} bytes"):
            packs.path(PACK)
        assert kept(tmp_path) == []


def test_a_damaged_file_is_replaced_or_removed(tmp_path: Path) -> None:
    path = Packs(lambda _: CONTENT, folder=tmp_path).path(PACK)
    path.write_bytes(CONTENT[:-1])
    assert Packs(lambda _: CONTENT, folder=tmp_path).path(PACK).read_bytes() == CONTENT
    path.write_bytes(CONTENT[:-1])
    with pytest.raises(PackCorrupt, match=r"damaged and is removed.*no answer"):
        Packs(gone, folder=tmp_path).path(PACK)
    assert kept(tmp_path) == []
    with pytest.raises(ServiceUnavailable):
        Packs(gone, folder=tmp_path).path(PACK)


@pytest.mark.parametrize("name", ["../../etc/passwd", "", "A" * 64])
def test_only_a_hash_becomes_a_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="not a pack hash"):
        Packs(never, folder=tmp_path).path(name)


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises(PackError, match="GEMMSMITH_CACHE_DIR"):
        Packs(lambda _: CONTENT, folder=blocked).path(PACK)


def test_threads_fetch_it_once(tmp_path: Path) -> None:
    asked: list[str] = []

    def read(pack_hash: str) -> bytes:
        asked.append(pack_hash)
        time.sleep(0.1)
        return CONTENT

    packs = Packs(read, folder=tmp_path)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(packs.path(PACK))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(found), len(set(found)), asked) == (8, 1, [PACK])


def _take(folder: str, log: str) -> None:
    def read(pack_hash: str) -> bytes:
        with Path(log).open("a") as file:
            file.write("fetched\n")
        time.sleep(0.2)
        return CONTENT

    assert Packs(read, folder=Path(folder)).path(PACK).read_bytes() == CONTENT


def test_processes_fetch_it_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    log = tmp_path / "log"
    workers = [
        context.Process(target=_take, args=(str(tmp_path / "cache"), str(log))) for _ in range(3)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert log.read_text() == "fetched\n"


def test_nobody_waits_long_for_a_process_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemmsmith.packs._TURN_S", 0.1)
    let_go = threading.Event()

    def hang(pack_hash: str) -> bytes:
        let_go.wait(20)
        return CONTENT

    hanging = threading.Thread(target=Packs(hang, folder=tmp_path).path, args=(PACK,))
    hanging.start()
    time.sleep(0.1)
    assert Packs(lambda _: CONTENT, folder=tmp_path).path(PACK).read_bytes() == CONTENT
    let_go.set()
    hanging.join()


def test_with_a_key_only_signed_packs_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY.decode())
    unsigned = snapshot(row(BIG))
    signed = snapshot(row(BIG, signature=sign(KEY, PACK)))
    forged = snapshot(row(BIG, signature=sign(b"another key, as long", PACK)))
    with pytest.raises(PackUntrusted, match="is not signed"):
        Packs(never, folder=tmp_path).path(PACK)
    with pytest.raises(PackUntrusted, match="is not signed"):
        Packs(never, folder=tmp_path, signed=lambda: unsigned).path(PACK)
    with pytest.raises(PackUntrusted, match="another key"):
        Packs(never, folder=tmp_path, signed=lambda: forged).path(PACK)
    packs = Packs(lambda _: CONTENT, folder=tmp_path, signed=lambda: signed)
    assert packs.path(PACK).read_bytes() == CONTENT
    # One that was cached before there was a key is no exception.
    with pytest.raises(PackUntrusted):
        Packs(never, folder=tmp_path, signed=lambda: unsigned).path(PACK)
    # The signature is of the hash: other bytes under it are refused as ever.
    other = tmp_path / "other"
    with pytest.raises(PackCorrupt):
        Packs(lambda _: b"other", folder=other, signed=lambda: signed).path(PACK)
    monkeypatch.delenv(KEY_VARIABLE)
    assert Packs(never, folder=tmp_path, signed=lambda: forged).path(PACK)


def test_a_key_is_long_enough_or_refused(tmp_path: Path) -> None:
    assert key_of({}) is None
    assert key_of({KEY_VARIABLE: ""}) is None
    assert key_of({KEY_VARIABLE: KEY.decode()}) == KEY
    for short in (lambda: key_of({KEY_VARIABLE: "short"}), lambda: Packs(never, key=b"")):
        with pytest.raises(ValueError, match="GEMMSMITH_PACK_KEY must have 16 characters or more"):
            short()


def test_a_signature_is_of_one_pack() -> None:
    assert sign(KEY, PACK) != sign(KEY, "0" * 64)
    assert sign(KEY, PACK) != sign(KEY + b"0", PACK)
    assert len(sign(KEY, PACK)) == 64
