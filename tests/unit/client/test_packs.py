"""Packs: their hash and their signature are checked, and they are fetched once."""

from __future__ import annotations

import json
import multiprocessing
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gemmsmith import (
    Client,
    PackCorrupt,
    PackError,
    Packs,
    PackUntrusted,
    Problem,
    ServiceUnavailable,
)
from gemmsmith.answers.snapshot import Snapshot
from gemmsmith.signing import Signer
from gemmsmith.winners import packs as library
from tests.support.processes import in_threads
from tests.support.replacing import replace
from tests.support.snapshots import BIG, CONFIG, CONTENT, PACK, row, snapshot, trusted_signer

Named = Callable[[], Snapshot]
SMALL = Problem(m=64, n=64, k=64)
OTHER = "e" * 64


@pytest.fixture(autouse=True)
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of trusted keys for this test only."""
    folder = tmp_path / "trusted"
    monkeypatch.setenv("GEMMSMITH_TRUSTED", str(folder))
    monkeypatch.delenv("GEMMSMITH_UNSIGNED", raising=False)
    return folder


@pytest.fixture
def signer(tmp_path: Path, keys: Path) -> Signer:
    return trusted_signer(tmp_path)


@pytest.fixture
def named(signer: Signer) -> Named:
    """A signed snapshot that names PACK."""
    winners = snapshot(row(BIG), signer=signer)
    return lambda: winners


def never(pack_hash: str) -> bytes:
    raise AssertionError(f"{pack_hash} was fetched")


def gone(pack_hash: str) -> bytes:
    raise ServiceUnavailable("no answer")


def kept(folder: Path) -> list[str]:
    return [path.name for path in (folder / "packs").iterdir()]


def test_a_pack_is_fetched_once_and_then_here(tmp_path: Path, named: Named) -> None:
    asked: list[str] = []

    def read(pack_hash: str) -> bytes:
        asked.append(pack_hash)
        return CONTENT

    packs = Packs(read, folder=tmp_path, signed=named)
    path = packs.path(PACK)
    assert path.read_bytes() == CONTENT
    assert packs.path(PACK) == path
    assert asked == [PACK]
    assert Packs(never, folder=tmp_path, signed=named).path(PACK) == path
    assert kept(tmp_path) == [f"{PACK}.so"]


@pytest.mark.parametrize("content", [CONTENT[:-1], CONTENT + b"!", b"", CONTENT.swapcase()])
def test_a_pack_with_another_hash_is_refused_and_not_kept(
    tmp_path: Path, named: Named, content: bytes
) -> None:
    packs = Packs(lambda _: content, folder=tmp_path, signed=named)
    for _ in range(2):
        with pytest.raises(PackCorrupt, match=rf"{PACK[:16]}.*{len(content)} bytes"):
            packs.path(PACK)
        assert kept(tmp_path) == []


def test_a_damaged_file_is_replaced_or_removed(tmp_path: Path, named: Named) -> None:
    path = Packs(lambda _: CONTENT, folder=tmp_path, signed=named).path(PACK)
    path.write_bytes(CONTENT[:-1])
    again = Packs(lambda _: CONTENT, folder=tmp_path, signed=named)
    assert again.path(PACK).read_bytes() == CONTENT
    path.write_bytes(CONTENT[:-1])
    with pytest.raises(PackCorrupt, match=r"damaged and is removed.*no answer"):
        Packs(gone, folder=tmp_path, signed=named).path(PACK)
    assert kept(tmp_path) == []
    with pytest.raises(ServiceUnavailable):
        Packs(gone, folder=tmp_path, signed=named).path(PACK)


@pytest.mark.parametrize("name", ["../../etc/passwd", "", "A" * 64])
def test_only_a_hash_becomes_a_path(tmp_path: Path, signer: Signer, name: str) -> None:
    bad = snapshot(row(BIG, config=replace(CONFIG, pack=name)), signer=signer)
    with pytest.raises(ValueError, match="not a pack hash"):
        Packs(never, folder=tmp_path, signed=lambda: bad).path(name)


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path, named: Named) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises(PackError, match="GEMMSMITH_CACHE_DIR"):
        Packs(lambda _: CONTENT, folder=blocked, signed=named).path(PACK)


def test_threads_fetch_it_once(tmp_path: Path, named: Named) -> None:
    asked: list[str] = []

    def read(pack_hash: str) -> bytes:
        asked.append(pack_hash)
        time.sleep(0.1)
        return CONTENT

    packs = Packs(read, folder=tmp_path, signed=named)
    paths: list[Path] = []
    in_threads(*[lambda: paths.append(packs.path(PACK))] * 8)
    assert (len(paths), len(set(paths)), asked) == (8, 1, [PACK])


def _take(folder: str, log: str, document: bytes) -> None:
    winners = Snapshot.parse(document)

    def read(pack_hash: str) -> bytes:
        with Path(log).open("a") as file:
            file.write("fetched\n")
        time.sleep(0.2)
        return CONTENT

    packs = Packs(read, folder=Path(folder), signed=lambda: winners)
    assert packs.path(PACK).read_bytes() == CONTENT


def test_processes_fetch_it_once(tmp_path: Path, named: Named) -> None:
    context = multiprocessing.get_context("spawn")
    log = tmp_path / "log"
    workers = [
        context.Process(target=_take, args=(str(tmp_path / "cache"), str(log), named().document))
        for _ in range(3)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert log.read_text() == "fetched\n"


def test_a_process_that_hangs_is_not_waited_for_long(
    tmp_path: Path, named: Named, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemmsmith.winners.packs._TURN_S", 0.1)
    let_go = threading.Event()

    def hang(pack_hash: str) -> bytes:
        let_go.wait(20)
        return CONTENT

    hanging = threading.Thread(target=Packs(hang, folder=tmp_path, signed=named).path, args=(PACK,))
    hanging.start()
    time.sleep(0.1)
    assert takes(named(), tmp_path).read_bytes() == CONTENT
    let_go.set()
    hanging.join()


def takes(winners: Snapshot, folder: Path) -> Path:
    return Packs(lambda _: CONTENT, folder=folder, signed=lambda: winners).path(PACK)


def test_only_packs_of_a_signed_snapshot_are_used(
    tmp_path: Path, signer: Signer, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = Signer.create(tmp_path / "stranger.key")
    unsigned, strangers = snapshot(row(BIG)), snapshot(row(BIG), signer=stranger)
    elsewhere = row(BIG, config=replace(CONFIG, pack=OTHER))
    for signed, reason in (
        (None, "no snapshot here names it"),
        (lambda: snapshot(elsewhere, signer=signer), "no snapshot here names it"),
        (lambda: unsigned, r"not signed.* python -m gemmsmith trust KEY\.pub"),
        (lambda: strangers, f"the key '{stranger.public.id}', which is not among the 1"),
    ):
        with pytest.raises(PackUntrusted, match=reason):
            Packs(never, folder=tmp_path / "cache", signed=signed).path(PACK)
    assert takes(snapshot(row(BIG), signer=signer), tmp_path / "cache").read_bytes() == CONTENT
    # A pack that was cached meanwhile is checked as well.
    with pytest.raises(PackUntrusted):
        takes(strangers, tmp_path / "cache")
    monkeypatch.setenv("GEMMSMITH_UNSIGNED", "1")
    assert takes(strangers, tmp_path / "cache")
    assert Packs(never, folder=tmp_path / "cache").path(PACK)
    # A damaged pack is rejected even if unsigned packs are allowed.
    with pytest.raises(PackCorrupt):
        Packs(lambda _: b"other", folder=tmp_path / "other", signed=lambda: unsigned).path(PACK)
    monkeypatch.setenv("GEMMSMITH_UNSIGNED", "perhaps")
    with pytest.raises(ValueError, match="takes 0 or 1"):
        takes(strangers, tmp_path / "cache")


def test_swapping_two_signed_packs_is_noticed(tmp_path: Path, signer: Signer) -> None:
    """An attacker without a key changes the document: each problem gets the other's pack."""
    rows = (row(BIG), row(SMALL, config=replace(CONFIG, pack=OTHER)))
    honest = snapshot(*rows, signer=signer)
    swapped = snapshot(row(BIG, config=rows[1].config), row(SMALL))
    assert set(swapped.packs()) == set(honest.packs())
    forged = json.loads(swapped.document) | {"signature": json.loads(honest.document)["signature"]}
    assert takes(honest, tmp_path / "cache")
    with pytest.raises(PackUntrusted, match="it was altered"):
        takes(
            Snapshot.parse(json.dumps(forged, separators=(",", ":")).encode()), tmp_path / "cache"
        )


def test_a_revoked_key_is_not_trusted_any_more(tmp_path: Path, keys: Path, signer: Signer) -> None:
    winners = snapshot(row(BIG), signer=signer)
    assert takes(winners, tmp_path / "cache")
    (keys / "signer.pub").unlink()
    with pytest.raises(PackUntrusted, match="not among the 0"):
        takes(winners, tmp_path / "cache")


def test_several_keys_are_believed_at_once(tmp_path: Path, signer: Signer) -> None:
    other = trusted_signer(tmp_path, name="new")
    for each in (signer, other):
        assert takes(snapshot(row(BIG), signer=each), tmp_path / "cache")


def test_a_refusal_names_the_service_to_trust(tmp_path: Path) -> None:
    with Client("http://there:8000", cache_dir=tmp_path) as client:
        packs = Packs.of(client, signed=lambda: snapshot(row(BIG)))
        with pytest.raises(PackUntrusted, match="python -m gemmsmith trust http://there:8000;"):
            packs.path(PACK)


def test_a_snapshot_without_packs_needs_no_signature(keys: Path) -> None:
    library.believe(snapshot(row(BIG, config=replace(CONFIG, pack=None))))
    with pytest.raises(PackUntrusted):
        library.believe(snapshot(row(BIG)))
    keys.mkdir()
    (keys / "odd.pub").write_text("odd")
    with pytest.raises(PackUntrusted, match=r"odd\.pub: not a public key"):
        library.believe(snapshot(row(BIG)))
