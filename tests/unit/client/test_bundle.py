"""Bundles: a file with winners and packs, which is rejected if it is damaged."""

from __future__ import annotations

import hashlib
import json
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from gemmsmith import Bundle, Lookup, PackCorrupt, PackUntrusted, Snapshot, SnapshotCorrupt, Use
from gemmsmith.signing import Signer, trusted_folder
from gemmsmith.winners.bundle import write_bundle
from tests.support.snapshots import (
    BIG,
    CONFIG,
    CONTENT,
    PACK,
    row,
    snapshot,
    trusted_signer,
)

OTHER_CONTENT = CONTENT * 1000
OTHER = hashlib.sha256(OTHER_CONTENT).hexdigest()
ROWS = (
    row(BIG),
    row(replace(BIG, m=64), config=replace(CONFIG, pack=OTHER)),
    row(replace(BIG, m=4), use=Use.CUBLAS, config=replace(CONFIG, pack="f" * 64)),
    row(replace(BIG, m=2), config=replace(CONFIG, pack=None)),
)


@pytest.fixture
def signer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Signer:
    monkeypatch.setenv("GEMMSMITH_TRUSTED", str(tmp_path / "trusted"))
    return trusted_signer(tmp_path)


@pytest.fixture
def winners(signer: Signer) -> Snapshot:
    return snapshot(*ROWS, signer=signer)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    folder = tmp_path / "built"
    folder.mkdir()
    files = {}
    for name, content in ((PACK, CONTENT), (OTHER, OTHER_CONTENT)):
        files[name] = folder / f"{name}.so"
        files[name].write_bytes(content)
    return files


@pytest.fixture
def baked(tmp_path: Path, files: dict[str, Path], winners: Snapshot) -> Path:
    path = tmp_path / "winners.gspack"
    assert write_bundle(path, winners, files) == path.stat().st_size
    return path


def test_a_bundle_brings_winners_and_packs(baked: Path, tmp_path: Path, winners: Snapshot) -> None:
    bundle = Bundle.open(baked, folder=tmp_path / "cache")
    assert bundle.snapshot == winners
    choice = Lookup(bundle.snapshot, pin=True).lookup("bf16", "tn", 4096, 4096, 4096)
    assert choice is not None
    assert choice.config.pack is not None
    path = bundle.packs.path(choice.config.pack)
    assert path.read_bytes() == CONTENT
    assert path.parent == tmp_path / "cache" / "packs"
    assert bundle.packs.path(OTHER).read_bytes() == OTHER_CONTENT
    with pytest.raises(PackUntrusted, match="no snapshot here names it"):
        bundle.packs.path("f" * 64)  # the winner is cuBLAS, so its pack never runs
    with zipfile.ZipFile(baked) as archive:
        stored = {info.filename: info.compress_type for info in archive.infolist()}
    assert stored == dict.fromkeys(
        ["snapshot.json", *sorted([f"packs/{PACK}.so", f"packs/{OTHER}.so"])], zipfile.ZIP_STORED
    )


def test_the_same_winners_give_the_same_bytes(
    baked: Path, tmp_path: Path, files: dict[str, Path], winners: Snapshot
) -> None:
    again = tmp_path / "again.gspack"
    write_bundle(again, winners, files)
    assert again.read_bytes() == baked.read_bytes()


def test_any_flipped_byte_of_a_pack_or_of_the_winners_is_noticed(
    baked: Path, tmp_path: Path
) -> None:
    whole = baked.read_bytes()
    for place in (whole.index(CONTENT) + 5, whole.index(b'"m":4096') + 5):
        baked.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises((PackCorrupt, SnapshotCorrupt)):
            Bundle.open(baked, folder=tmp_path / "cache").packs.path(PACK)
        assert not list(tmp_path.glob("cache/packs/*"))


def test_a_pack_that_replaces_another_is_refused(baked: Path, tmp_path: Path) -> None:
    """The zip is valid, but a pack's name has other bytes."""
    with zipfile.ZipFile(baked) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    members[f"packs/{PACK}.so"] = b"something else"
    with zipfile.ZipFile(baked, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    with pytest.raises(PackCorrupt, match=PACK[:16]):
        Bundle.open(baked, folder=tmp_path / "cache").packs.path(PACK)
    assert not list(tmp_path.glob("cache/packs/*"))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
def test_a_truncated_bundle_is_refused(baked: Path, share: float) -> None:
    whole = baked.read_bytes()
    baked.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(PackCorrupt, match="not a whole bundle"):
        Bundle.open(baked)


def test_a_bundle_without_a_pack_is_refused(baked: Path, winners: Snapshot) -> None:
    with zipfile.ZipFile(baked, "w") as archive:
        archive.writestr("snapshot.json", winners.document)
    with pytest.raises(PackCorrupt, match="lacks 2 of 2 packs"):
        Bundle.open(baked)


def test_nothing_is_baked_from_damaged_or_missing_packs(
    tmp_path: Path, files: dict[str, Path], winners: Snapshot
) -> None:
    target = tmp_path / "out" / "x.gspack"
    with pytest.raises(PackCorrupt, match="not here"):
        write_bundle(target, winners, {PACK: files[PACK]})
    files[OTHER].write_bytes(b"damaged")
    with pytest.raises(PackCorrupt, match="SHA-256"):
        write_bundle(target, winners, files)
    assert list(target.parent.iterdir()) == []


def test_a_bundle_runs_where_its_signer_is_trusted(
    baked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Bundle.open(baked, folder=tmp_path / "cache").packs.path(PACK)
    (trusted_folder() / "signer.pub").unlink()
    with pytest.raises(PackUntrusted, match=r"python -m gemmsmith trust KEY\.pub"):
        Bundle.open(baked, folder=tmp_path / "cache").packs.path(PACK)
    monkeypatch.setenv("GEMMSMITH_UNSIGNED", "1")
    assert Bundle.open(baked, folder=tmp_path / "cache").packs.path(PACK)


def test_a_rebuilt_bundle_has_no_valid_signature(
    baked: Path, tmp_path: Path, files: dict[str, Path], winners: Snapshot
) -> None:
    """It is complete and has the right hashes, but the packs of two problems are swapped."""
    swapped = snapshot(replace(ROWS[0], config=ROWS[1].config), replace(ROWS[1], config=CONFIG))
    for document in (swapped.document, signed_as(swapped, winners)):
        write_bundle(baked, Snapshot.parse(document), files)
        with pytest.raises(PackUntrusted):
            Bundle.open(baked, folder=tmp_path / "cache").packs.path(PACK)


def signed_as(forged: Snapshot, honest: Snapshot) -> bytes:
    signature = json.loads(honest.document)["signature"]
    document = json.loads(forged.document) | {"signature": signature}
    return json.dumps(document, separators=(",", ":")).encode()
