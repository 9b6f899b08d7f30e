"""Archives of packs: what went in comes out, and a part of one is none."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from gemmsmith.errors import PackCorrupt
from gemmsmith.problem import Problem
from tuner.backends import kernels
from tuner.compile import ArtifactStore, Toolchain
from tuner.compile.archive import archive, check, unarchive

TOOLCHAIN = Toolchain(nvcc=Path("nvcc"), version="13.0.88", origin="wheels")
PROBLEM = Problem(m=256, n=256, k=256)


@pytest.fixture
def packs(tmp_path: Path) -> ArtifactStore:
    """Three packs."""
    store = ArtifactStore(tmp_path / "packs")
    for number, kernel in enumerate(kernels(PROBLEM)[:3]):
        compiled = tmp_path / "unit.so"
        compiled.write_bytes(b"\x7fELF" + bytes([number]) * 700)
        store.publish(compiled, [kernel], TOOLCHAIN)
    return store


def content(store: ArtifactStore) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in store.root.glob("*.so")}


def test_packs_come_back(packs: ArtifactStore, tmp_path: Path) -> None:
    target = tmp_path / "packs.tar"
    assert archive(packs, target) == 3
    check(target)
    other = ArtifactStore(tmp_path / "other")
    assert unarchive(target, other) == 3
    assert content(other) == content(packs)
    assert len(content(other)) == 3
    assert unarchive(target, other) == 3  # they are there already
    assert [path.name for path in tmp_path.glob(".aside-*")] == []


def test_an_archive_that_ends_early_is_refused_wherever_it_ends(
    packs: ArtifactStore, tmp_path: Path
) -> None:
    target, part = tmp_path / "packs.tar", tmp_path / "part.tar"
    archive(packs, target)
    with tarfile.open(target) as tar:
        end = max(member.offset_data + member.size for member in tar)
    whole = target.read_bytes()
    for length in range(0, end, 256):
        part.write_bytes(whole[:length])
        with pytest.raises(PackCorrupt, match="no whole archive"):
            check(part)


def test_a_changed_byte_is_found(packs: ArtifactStore, tmp_path: Path) -> None:
    target = tmp_path / "packs.tar"
    archive(packs, target)
    with tarfile.open(target) as tar:
        second = [member for member in tar if member.name.endswith(".so")][1]
    spoiled = bytearray(target.read_bytes())
    spoiled[second.offset_data + 300] ^= 1
    target.write_bytes(spoiled)
    with pytest.raises(PackCorrupt, match=second.name[:64]):
        check(target)
