"""The packs folder stays below its limit, and what somebody needs stays in it."""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
import time
from pathlib import Path

import pytest

from gemmsmith.core.kernel import Kernel
from gemmsmith.core.problem import Problem
from service.settings import Settings, SettingsError
from service.worker.builder import open_artifacts, open_builder
from tests.support import fake_nvcc
from tests.support.candidates import KERNEL
from tests.support.replacing import replace
from tests.support.serving import H200, new_settings, promote, winner
from tuner.backends import kernels
from tuner.compile import ArtifactStore, Pack, SizeLimit, Toolchain
from tuner.compile.eviction import MARK_EVERY_S, SAFE_S, locked
from tuner.store import Store

PROBLEM = Problem(m=64, n=64, k=64)
SIZE = 100_000
LONG_AGO = 24 * 3600.0
MEMBERS = kernels(PROBLEM)[:12]


@pytest.fixture
def toolchain(tmp_path: Path) -> Toolchain:
    return fake_nvcc.toolchain(tmp_path / "toolchain")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "packs"


def publish(store: ArtifactStore, toolchain: Toolchain, member: Kernel) -> Pack:
    """A pack of SIZE bytes with one kernel."""
    compiled = store.root.parent / f"{os.getpid()}.so"
    compiled.write_bytes(member.name.encode().ljust(SIZE, b"."))
    return store.publish(compiled, [member], toolchain)


def used(pack: Pack, seconds_ago: float) -> Pack:
    """As if the pack had been used so long ago."""
    then = time.time() - seconds_ago
    os.utime(pack.path.with_suffix(".json"), (then, then))
    return pack


def filled(root: Path, toolchain: Toolchain, count: int) -> list[Pack]:
    """Packs of MEMBERS that nobody has used for a day or more, the first for longest."""
    store = ArtifactStore(root)
    packs = [publish(store, toolchain, member) for member in MEMBERS[:count]]
    return [used(pack, LONG_AGO + count - i) for i, pack in enumerate(packs)]


def limited(root: Path, packs: float, **more: object) -> ArtifactStore:
    """A store that may hold so many packs (their manifests take a little of it)."""
    return ArtifactStore(root, limit=SizeLimit(bytes=int(packs * SIZE), **more))  # type: ignore[arg-type]


def here(root: Path) -> set[str]:
    hashes = {path.stem for path in root.glob("*.so")}
    assert hashes == {path.stem for path in root.glob("*.json")}
    assert not list(root.glob(".*"))
    return hashes


def test_publishing_above_the_limit_removes_what_was_used_longest_ago(
    root: Path, toolchain: Toolchain
) -> None:
    packs = filled(root, toolchain, 5)
    used(packs[0], LONG_AGO - 100)  # somebody came back to the oldest
    gone: list[str] = []
    store = limited(root, 5.5, evicted=gone.append)
    new = publish(store, toolchain, MEMBERS[5])
    # 90% of 5.5 packs: four of them, with their manifests.
    assert gone == [packs[1].hash, packs[2].hash]
    assert here(root) == {packs[0].hash, packs[3].hash, packs[4].hash, new.hash}
    assert store.find(MEMBERS[1]) is None
    assert store.find(MEMBERS[0]) == packs[0]
    size = sum(path.stat().st_size for path in root.iterdir())
    assert size <= 0.9 * 5.5 * SIZE


def test_at_the_limit_nothing_goes(root: Path, toolchain: Toolchain) -> None:
    packs = filled(root, toolchain, 5)
    new = publish(limited(root, 6.5), toolchain, MEMBERS[5])
    assert here(root) == {new.hash, *(pack.hash for pack in packs)}


def test_without_a_limit_nothing_goes(root: Path, toolchain: Toolchain) -> None:
    packs = filled(root, toolchain, 12)
    assert here(root) == {pack.hash for pack in packs}


@pytest.mark.parametrize("how", ["find", "get"])
def test_what_another_process_finds_or_gets_is_used(
    root: Path, toolchain: Toolchain, how: str
) -> None:
    packs = filled(root, toolchain, 4)
    other = ArtifactStore(root)
    found = other.find(MEMBERS[0]) if how == "find" else other.get(packs[0].hash)
    assert found == packs[0]
    new = publish(limited(root, 3.5), toolchain, MEMBERS[4])
    assert here(root) == {packs[0].hash, packs[3].hash, new.hash}


def test_listing_packs_is_not_using_them(root: Path, toolchain: Toolchain) -> None:
    packs = filled(root, toolchain, 3)
    before = [pack.path.with_suffix(".json").stat().st_mtime for pack in packs]
    store = ArtifactStore(root)
    assert len(store.packs()) == len(store.manifests()) == 3
    assert [pack.path.with_suffix(".json").stat().st_mtime for pack in packs] == before


def test_a_pack_is_marked_as_used_at_most_once_an_hour(root: Path, toolchain: Toolchain) -> None:
    (pack,) = filled(root, toolchain, 1)
    manifest = pack.path.with_suffix(".json")
    store = ArtifactStore(root)
    used(pack, MARK_EVERY_S - 60)
    before = manifest.stat().st_mtime_ns
    assert store.find(MEMBERS[0]) == pack
    assert manifest.stat().st_mtime_ns == before
    used(pack, MARK_EVERY_S + 60)
    assert store.find(MEMBERS[0]) == pack
    assert time.time() - manifest.stat().st_mtime < 60


def test_packs_in_use_stay_and_the_store_grows_with_one_warning(
    root: Path, toolchain: Toolchain, caplog: pytest.LogCaptureFixture
) -> None:
    packs = filled(root, toolchain, 3)
    for pack in packs:
        # Marked an hour before its last use at the most, which was less than an hour ago.
        used(pack, MARK_EVERY_S + SAFE_S - 60)
    store = limited(root, 1.5)
    with caplog.at_level(logging.WARNING):
        new = [publish(store, toolchain, member) for member in MEMBERS[3:5]]
    assert here(root) == {pack.hash for pack in [*packs, *new]}
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(root) in caplog.text
    for pack in packs:
        used(pack, MARK_EVERY_S + SAFE_S + 60)
    last = publish(store, toolchain, MEMBERS[5])
    assert here(root) == {pack.hash for pack in [*new, last]}


def test_what_is_to_be_kept_stays(root: Path, toolchain: Toolchain) -> None:
    packs = filled(root, toolchain, 4)
    store = limited(root, 1.5, keep=lambda: [packs[0].hash, packs[2].hash])
    new = publish(store, toolchain, MEMBERS[4])
    assert here(root) == {packs[0].hash, packs[2].hash, new.hash}


def test_nobody_is_asked_what_to_keep_while_there_is_room(root: Path, toolchain: Toolchain) -> None:
    def ask() -> list[str]:
        raise AssertionError("asked")

    publish(limited(root, 1.5, keep=ask), toolchain, MEMBERS[0])


def test_the_pack_just_published_stays_however_large(root: Path, toolchain: Toolchain) -> None:
    filled(root, toolchain, 2)
    new = publish(limited(root, 0.5), toolchain, MEMBERS[2])
    assert here(root) == {new.hash}


def test_the_other_store_on_the_folder_misses_what_went(root: Path, toolchain: Toolchain) -> None:
    filled(root, toolchain, 2)
    other = ArtifactStore(root)
    assert len(other.packs()) == 2
    publish(limited(root, 1.5), toolchain, MEMBERS[2])
    assert other.find(MEMBERS[0]) is None
    assert [pack.kernels for pack in other.packs()] == [(MEMBERS[2].name,)]
    again = publish(other, toolchain, MEMBERS[0])
    assert other.find(MEMBERS[0]) == again


def test_evicted_between_finding_and_marking_is_a_miss(
    root: Path, toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pack,) = filled(root, toolchain, 1)
    store = ArtifactStore(root)
    assert store.packs() == [pack]

    def too_late(manifest: Path) -> None:
        manifest.unlink()
        pack.path.unlink()
        raise FileNotFoundError(manifest)

    monkeypatch.setattr("tuner.compile.artifacts.mark_used", too_late)
    assert store.find(MEMBERS[0]) is None


def test_used_while_others_are_evicted_comes_back(root: Path, toolchain: Toolchain) -> None:
    packs = filled(root, toolchain, 3)
    other = ArtifactStore(root)

    def meanwhile(pack_hash: str) -> None:
        assert pack_hash in (packs[0].hash, packs[2].hash)
        assert other.find(MEMBERS[1]) == packs[1]

    new = publish(limited(root, 2.5, evicted=meanwhile), toolchain, MEMBERS[3])
    assert here(root) == {packs[1].hash, new.hash}
    assert other.find(MEMBERS[1]) == packs[1]


def test_remains_of_killed_processes_go_too_and_foreign_files_stay(
    root: Path, toolchain: Toolchain
) -> None:
    packs = filled(root, toolchain, 2)
    packs[0].path.with_suffix(".json").unlink()  # killed between the two removals
    os.utime(packs[0].path, (0, 0))
    foreign = root / "notes.so"
    foreign.write_bytes(b"." * SIZE)
    os.utime(foreign, (0, 0))
    new = publish(limited(root, 2.5), toolchain, MEMBERS[2])
    foreign.unlink()
    assert here(root) == {packs[1].hash, new.hash}


def test_an_open_pack_outlives_its_name(root: Path, toolchain: Toolchain) -> None:
    (pack,) = filled(root, toolchain, 1)
    with pack.path.open("rb") as opened:
        publish(limited(root, 1.5), toolchain, MEMBERS[1])
        assert not pack.path.exists()
        assert len(opened.read()) == SIZE


def _churn(root: Path, toolchain: Toolchain, worker: int) -> None:
    """Publish, find and age packs beside others that do so, under a limit of four."""
    store = limited(root, 4.5)
    for round_ in range(3):
        for member in MEMBERS[worker:] + MEMBERS[:worker]:
            pack = publish(store, toolchain, member)
            try:
                assert len(pack.path.read_bytes()) == SIZE, round_
                used(pack, LONG_AGO)
            except FileNotFoundError:
                continue  # the others age it too, and may have evicted it already
            store.find(MEMBERS[(worker + round_) % len(MEMBERS)])


def test_processes_that_publish_and_evict_at_once_do_each_other_no_harm(
    root: Path, toolchain: Toolchain
) -> None:
    root.mkdir()
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_churn, args=(root, toolchain, worker)) for worker in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    hashes = here(root)
    assert {pack.hash for pack in ArtifactStore(root).packs()} == hashes


def test_publishing_waits_for_an_eviction(root: Path, toolchain: Toolchain) -> None:
    root.mkdir()
    store = ArtifactStore(root)
    with locked(root, exclusive=True):
        thread = threading.Thread(target=publish, args=(store, toolchain, MEMBERS[0]))
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        assert not list(root.glob("*.so"))
    thread.join(10)
    assert len(here(root)) == 1


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return new_settings(tmp_path, packs_limit_gb=2.5 * SIZE / 1e9)


def test_winners_packs_stay_and_the_store_forgets_the_others(
    settings: Settings, toolchain: Toolchain
) -> None:
    packs = filled(settings.packs, toolchain, 5)
    promoted = winner(PROBLEM)
    assert promoted.candidate is not None
    assert promoted.candidate.kernel == MEMBERS[0]
    promote(settings, promoted)
    named = replace(promoted, problem=Problem(m=128, n=64, k=64), candidate=None)
    # The second winner names its pack; the first one's kernel is in a pack.
    promote(settings, replace(named, pack=packs[1].hash))
    with Store.open(settings.database) as store:
        for pack, member in zip(packs, MEMBERS, strict=False):
            store.add_pack(pack.hash, pack.toolchain, [member], SIZE)
        assert store.winners_packs() == {packs[0].hash, packs[1].hash}
        new = publish(open_artifacts(settings, store), toolchain, MEMBERS[5])
        assert here(settings.packs) == {packs[0].hash, packs[1].hash, new.hash}
        assert store.pack_for(MEMBERS[0].name) == packs[0].hash
        assert store.pack_for(MEMBERS[2].name) is None
        assert store.winner(named.problem, H200.slug) is not None


def test_a_winner_of_the_past_no_longer_names_an_evicted_pack(
    settings: Settings, toolchain: Toolchain
) -> None:
    packs = filled(settings.packs, toolchain, 3)
    first = replace(winner(PROBLEM), pack=packs[0].hash)
    later = winner(PROBLEM, us=5.0)
    assert later.candidate is not None
    promote(settings, first, replace(later, candidate=replace(later.candidate, kernel=KERNEL)))
    with Store.open(settings.database) as store:
        for pack, member in zip(packs, MEMBERS, strict=False):
            store.add_pack(pack.hash, pack.toolchain, [member], SIZE)
        new = publish(open_artifacts(settings, store), toolchain, MEMBERS[5])
        assert here(settings.packs) == {packs[2].hash, new.hash}
        assert store.pin(PROBLEM, H200.slug, 1).winner.pack is None


def test_a_pack_built_again_after_its_eviction_is_recorded_again(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = fake_nvcc.toolchain(tmp_path / "toolchain")
    monkeypatch.setattr("service.worker.builder.find_toolchain", lambda: compiler)
    with Store.open(settings.database) as store:
        builder = open_builder(settings, store, 1)
        (built,) = builder.build(MEMBERS[:1])
        assert built.pack is not None
        assert store.pack_for(MEMBERS[0].name) == built.pack.hash
        used(built.pack, LONG_AGO)
        for member in MEMBERS[1:4]:
            publish(builder.store, compiler, member)
        assert store.pack_for(MEMBERS[0].name) is None
        (again,) = builder.build(MEMBERS[:1])
        assert again.pack == built.pack
        assert store.pack_for(MEMBERS[0].name) == built.pack.hash


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "much"])
def test_a_limit_that_makes_no_sense_is_refused(value: str) -> None:
    with pytest.raises(SettingsError, match="GEMMSMITH_PACKS_LIMIT_GB"):
        Settings.load({"GEMMSMITH_PACKS_LIMIT_GB": value})
    assert Settings.load({"GEMMSMITH_PACKS_LIMIT_GB": "0.5"}).packs_limit_gb == 0.5
