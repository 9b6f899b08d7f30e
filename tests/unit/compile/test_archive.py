"""Archives of packs: what went in comes out, and a part of one is none."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from pathlib import Path
from random import Random
from tarfile import TarInfo

import pytest

from gemmsmith.core.problem import Problem
from gemmsmith.errors import PackCorrupt
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
        with pytest.raises(PackCorrupt, match="not a complete archive"):
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


def rewritten(whole: Path, target: Path, change: Callable[[TarInfo], TarInfo | None]) -> None:
    """The archive with every member's header as `change` leaves it; members that become None go."""
    with tarfile.open(whole) as tar, tarfile.open(target, "w") as other:
        for member in tar:
            content = tar.extractfile(member)
            changed = change(copy(member))
            if changed is not None:
                other.addfile(changed, content if changed.isreg() else None)


def of_type(kind: bytes, linkname: str = "") -> Callable[[TarInfo], TarInfo]:
    def change(member: TarInfo) -> TarInfo:
        if member.name.endswith(".so"):
            member.type, member.linkname = kind, linkname
        return member

    return change


def named(template: str, only: str = ".so") -> Callable[[TarInfo], TarInfo]:
    def change(member: TarInfo) -> TarInfo:
        if member.name.endswith(only):
            member.name = template.format(member.name)
        return member

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (of_type(tarfile.SYMTYPE, "/etc/passwd"), "is not a plain file"),
        (of_type(tarfile.SYMTYPE, "end.json"), "is not a plain file"),
        (of_type(tarfile.LNKTYPE, "end.json"), "is not a plain file"),
        (of_type(tarfile.LNKTYPE, "gone"), "is not a plain file"),
        (of_type(tarfile.CHRTYPE), "is not a plain file"),
        (of_type(tarfile.BLKTYPE), "is not a plain file"),
        (of_type(tarfile.FIFOTYPE), "is not a plain file"),
        (of_type(tarfile.DIRTYPE), "is not a plain file"),
        (of_type(tarfile.CONTTYPE), "is not a plain file"),
        (named("/{}"), "it holds '/"),
        (named("/etc/{}"), "it holds '/etc/"),
        (named("../{}"), "it holds '../"),
        (named("./{}"), "it holds './"),
        (named("packs/{}"), "it holds 'packs/"),
        (named("{}.so"), r"it holds '.*\.so\.so"),
        (named("\n{}"), r"it holds '\\n"),
        (named("{}\x1b[2J"), r"it holds '.*\\x1b"),
        (named("ü{}"), "it holds 'ü"),
        (named("0{}"), "it holds '0"),
        (named("0" * 64 + ".json", only=".json"), "no manifest|end is missing"),
        (lambda m: None if m.name == "end.json" else m, "its end is missing"),
        (lambda m: None if m.name.endswith(".so") else m, "its end is missing"),
        (lambda m: None if len(m.name) > 60 and m.name.endswith("json") else m, "no manifest"),
    ],
)
def test_what_archive_writes_none_of_is_one_line(
    packs: ArtifactStore,
    tmp_path: Path,
    change: Callable[[TarInfo], TarInfo | None],
    message: str,
) -> None:
    archive(packs, tmp_path / "packs.tar")
    rewritten(tmp_path / "packs.tar", tmp_path / "odd.tar", change)
    other = ArtifactStore(tmp_path / "other")
    for read in (check, lambda source: unarchive(source, other)):
        with pytest.raises(PackCorrupt, match=message) as caught:
            read(tmp_path / "odd.tar")
        assert "\n" not in str(caught.value)
        assert "\x1b" not in str(caught.value)
    assert {path.suffix for path in tmp_path.glob("other/*")} <= {".so", ".json"}


def test_an_archive_with_any_byte_changed_is_whole_or_refused(
    packs: ArtifactStore, tmp_path: Path
) -> None:
    archive(packs, tmp_path / "packs.tar")
    whole = (tmp_path / "packs.tar").read_bytes()
    odd, random = tmp_path / "odd.tar", Random(25)
    refused = 0
    for _ in range(400):
        content = bytearray(whole)
        for _ in range(random.choice((1, 1, 8))):
            content[random.randrange(len(content))] = random.randrange(256)
        odd.write_bytes(content)
        with suppress(PackCorrupt):
            check(odd)
            continue
        refused += 1
    assert refused > 200
