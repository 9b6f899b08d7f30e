"""Packs are published whole or not at all, and what is damaged is a miss."""

from __future__ import annotations

import multiprocessing
import os
import resource
import time
from pathlib import Path

import pytest

from gemmsmith.core.kernel import Kernel
from tests.support import fake_nvcc
from tests.support.candidates import several
from tests.support.replacing import replace
from tuner.compile import ArtifactStore, Pack, Toolchain
from tuner.errors import DiskFull


@pytest.fixture
def toolchain(tmp_path: Path) -> Toolchain:
    return fake_nvcc.toolchain(tmp_path / "toolchain")


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "packs")


def publish(
    store: ArtifactStore, toolchain: Toolchain, members: list[Kernel], content: bytes = b"pack"
) -> Pack:
    compiled = store.root.parent / "compiled.so"
    compiled.write_bytes(content)
    return store.publish(compiled, members, toolchain)


def test_published_pack_is_found_by_each_kernel(store: ArtifactStore, toolchain: Toolchain) -> None:
    members = several(3)
    pack = publish(store, toolchain, members)
    assert pack.kernels == tuple(member.name for member in members)
    assert pack.path.read_bytes() == b"pack"
    for member in members:
        assert store.find(member) == pack
        assert ArtifactStore(store.root).find(member, toolchain=toolchain.digest) == pack
    assert store.get(pack.hash) == pack
    assert store.packs() == [pack]


def test_same_name_compiled_from_other_text_is_not_found(
    store: ArtifactStore, toolchain: Toolchain
) -> None:
    (member,) = several(1)
    publish(store, toolchain, [member])
    assert store.find(replace(member, alignment_d=16)) is None


def test_other_toolchain_is_not_found_when_one_is_asked_for(
    store: ArtifactStore, toolchain: Toolchain
) -> None:
    (member,) = several(1)
    pack = publish(store, toolchain, [member])
    newer = replace(toolchain, version="13.1.0")
    assert store.find(member, toolchain=newer.digest) is None
    assert store.find(member) == pack
    # The newer compiler made the same bytes: the pack is that toolchain's now.
    assert publish(store, newer, [member]) == pack
    assert store.find(member, toolchain=newer.digest) == pack


def test_the_newest_of_several_packs_is_found(store: ArtifactStore, toolchain: Toolchain) -> None:
    (member,) = several(1)
    publish(store, toolchain, [member], b"first")
    second = publish(store, toolchain, [member], b"second")
    assert store.find(member) == second


@pytest.mark.parametrize("content", [b"", b"pac", b"kcap"])
def test_damaged_pack_is_a_miss_and_removed(
    store: ArtifactStore, toolchain: Toolchain, content: bytes
) -> None:
    (member,) = several(1)
    pack = publish(store, toolchain, [member])
    assert store.get(pack.hash) == pack
    pack.path.write_bytes(content)
    assert store.get(pack.hash) is None
    assert store.find(member) is None
    assert list(store.root.iterdir()) == []
    assert publish(store, toolchain, [member]) == pack


def test_damaged_pack_does_not_hide_an_older_whole_one(
    store: ArtifactStore, toolchain: Toolchain
) -> None:
    (member,) = several(1)
    older = publish(store, toolchain, [member], b"older")
    newer = publish(store, toolchain, [member], b"newer")
    newer.path.write_bytes(b"never")
    assert store.find(member) == older


def test_pack_without_its_file_or_manifest_is_a_miss(
    store: ArtifactStore, toolchain: Toolchain
) -> None:
    first, second = several(2)
    without_file = publish(store, toolchain, [first], b"first")
    without_manifest = publish(store, toolchain, [second], b"second")
    without_file.path.unlink()
    without_manifest.path.with_suffix(".json").write_text("{truncated")
    fresh = ArtifactStore(store.root)
    assert fresh.find(first) is None
    assert fresh.find(second) is None
    assert fresh.get(without_manifest.hash) is None


@pytest.mark.parametrize(
    "name", ["", "../secret", "..", "/etc/passwd", "a" * 63, "A" * 64, f"{'a' * 64}/..", "a" * 65]
)
def test_get_never_leaves_its_directory(store: ArtifactStore, name: str) -> None:
    store.root.mkdir()
    (store.root.parent / "secret.so").write_bytes(b"secret")
    assert store.get(name) is None


def test_packs_of_another_process_appear_without_reopening(
    store: ArtifactStore, toolchain: Toolchain
) -> None:
    first, second = several(2)
    publish(store, toolchain, [first], b"first")
    assert store.find(second) is None
    pack = publish(ArtifactStore(store.root), toolchain, [second], b"second")
    assert store.find(second) == pack
    pack.path.unlink()
    pack.path.with_suffix(".json").unlink()
    assert store.find(second) is None


def _publish_repeatedly(root: Path, toolchain: Toolchain, worker: int) -> None:
    store = ArtifactStore(root / "packs")
    compiled = root / f"compiled-{worker}.so"
    for i, member in enumerate(several(20)):
        compiled.write_bytes(b"pack %d" % i)
        assert store.publish(compiled, [member], toolchain).path.is_file()


def test_several_processes_publish_the_same_packs(tmp_path: Path, toolchain: Toolchain) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_publish_repeatedly, args=(tmp_path, toolchain, worker))
        for worker in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    store = ArtifactStore(tmp_path / "packs")
    assert len(store.packs()) == 20
    assert all(store.find(member) for member in several(20))
    assert not list(store.root.glob(".*"))


def test_lookup_over_many_packs_is_fast(
    store: ArtifactStore, toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # only the lookup is timed
    members = several(500)
    for i, member in enumerate(members):
        publish(store, toolchain, [member], b"pack %d" % i)
    assert store.find(members[0]) is not None
    started = time.perf_counter()
    found = [store.find(member, toolchain=toolchain.digest) for member in members]
    elapsed = time.perf_counter() - started
    assert all(found)
    assert elapsed / len(members) < 0.01


def test_full_disk_publishes_nothing_and_keeps_what_was_there(
    small_disk: Path, tmp_path: Path, toolchain: Toolchain
) -> None:
    store = ArtifactStore(small_disk / "packs")
    first, second = several(2)
    compiled = tmp_path / "compiled.so"
    compiled.write_bytes(os.urandom(700_000))
    pack = store.publish(compiled, [first], toolchain)
    compiled.write_bytes(os.urandom(700_000))
    with pytest.raises(DiskFull, match="free some space"):
        store.publish(compiled, [second], toolchain)
    assert store.find(first) == pack
    assert store.find(second) is None
    assert {path.suffix for path in store.root.iterdir()} == {".so", ".json"}
    assert len(list(store.root.iterdir())) == 2


def test_file_size_limit_counts_as_a_full_disk(store: ArtifactStore, toolchain: Toolchain) -> None:
    (member,) = several(1)
    compiled = store.root.parent / "compiled.so"
    compiled.write_bytes(b"x" * 100_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(DiskFull, match="half-written"):
            store.publish(compiled, [member], toolchain)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(store.root.iterdir()) == []


def test_files_left_aside_by_a_killed_process_are_removed(
    store: ArtifactStore, toolchain: Toolchain
) -> None:
    (member,) = several(1)
    store.root.mkdir()
    old, recent = store.root / ".aside-old", store.root / ".aside-recent"
    for path in (old, recent):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    publish(store, toolchain, [member])
    assert not old.exists()
    assert recent.exists()
