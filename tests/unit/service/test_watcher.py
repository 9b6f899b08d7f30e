"""What keeps answers true: every kind of change, on both kinds of database, made by somebody else.

`look_up` is what a request does. The other side is another `Store`, with connections of its own,
or another process.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import structlog
from structlog.typing import EventDict

from gemmsmith.answers.answer import Answer
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.problem import Problem
from service.lookup import find, watcher
from service.lookup.cache import Answers, Rendered
from service.lookup.devices import Catalogue
from service.lookup.watcher import EVERY_S, StoreWatcher
from tests.support import serving
from tests.support.docs import ROOT
from tests.support.present import present
from tests.support.processes import until
from tests.support.replacing import replace
from tests.support.serving import ENVIRONMENT, H100, H200
from tuner.errors import StoreError
from tuner.store import Store
from tuner.store.changes import Changes, Marks

KNOWN = Problem(m=4096, n=4096, k=4096)
NEAR = replace(KNOWN, m=4000)
FAR = Problem(m=64, n=64, k=64)
NEWER = replace(ENVIRONMENT, cuda="13.1")


@pytest.fixture(autouse=True)
def _new_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that ran in this process before has bound the module's own for good."""
    monkeypatch.setattr(watcher, "log", structlog.get_logger("gemmsmith.service"))


@dataclass(frozen=True, kw_only=True)
class Lookups:
    """A memory over a store."""

    store: Store
    answers: Answers
    catalogue: Catalogue
    watcher: StoreWatcher

    def look_up(self, problem: Problem, device: DeviceModel = H200) -> Answer:
        """The truth, read and kept."""
        generation = self.answers.generation
        answer = find.find(
            self.store,
            problem,
            device,
            accepted=find.ANY,
        )
        assert answer is not None
        self.answers.keep(Rendered.of(answer), generation)
        return answer

    def keep(self, *problems: Problem) -> None:
        for problem in problems:
            self.look_up(problem)
        assert self.remembered(*problems) == set(problems)

    def remembered(self, *problems: Problem) -> set[Problem]:
        answers = self.answers.get_many(H200.slug, problems, find.ANY)
        return {answer.problem for answer in answers if answer is not None}


@pytest.fixture
def lookups(store: Store) -> Lookups:
    """Nobody looks but by `refresh`."""
    store.promote(serving.winner(KNOWN))
    return lookups_of(store)


def lookups_of(store: Store) -> Lookups:
    answers = Answers(100)
    catalogue = Catalogue(store.devices, None)
    watcher = StoreWatcher(store, answers, catalogue)
    watcher.refresh()
    return Lookups(store=store, answers=answers, catalogue=catalogue, watcher=watcher)


@contextmanager
def changes(lookups: Lookups, store_url: str) -> Iterator[Store]:
    """What another program changes; it has been looked for at the end."""
    with Store.open(store_url) as store:
        yield store
    lookups.watcher.refresh()


def test_without_a_change_everything_stays(lookups: Lookups) -> None:
    lookups.keep(KNOWN, NEAR, FAR)
    lookups.store.add_trial(serving.trial(KNOWN))
    lookups.store.promote(serving.winner(KNOWN))  # the same again
    generation = lookups.answers.generation
    lookups.watcher.refresh()
    assert lookups.remembered(KNOWN, NEAR, FAR) == {KNOWN, NEAR, FAR}
    assert lookups.answers.generation == generation


def test_a_promotion_drops_the_problem_and_its_neighbourhood(
    lookups: Lookups, store_url: str
) -> None:
    lookups.keep(KNOWN, NEAR, FAR)
    with changes(lookups, store_url) as store:
        store.promote(serving.winner(KNOWN, us=5.0))
    assert lookups.remembered(KNOWN, NEAR, FAR) == {FAR}
    for problem in (KNOWN, NEAR):
        found = present(lookups.look_up(problem).statistics)
        assert found.median_us == 5.0


def test_pins_and_what_undoes_them_drop(lookups: Lookups, store_url: str) -> None:
    with changes(lookups, store_url) as store:
        store.promote(serving.winner(KNOWN, us=5.0))
        lookups.watcher.refresh()
        lookups.keep(KNOWN)
        store.pin(KNOWN, H200.slug, 1)
        lookups.watcher.refresh()
        assert not lookups.remembered(KNOWN)
        assert lookups.look_up(KNOWN).pinned
        store.unpin(KNOWN, H200.slug)
        lookups.watcher.refresh()
        assert not lookups.remembered(KNOWN)
        assert lookups.look_up(KNOWN).revision == 2
        store.roll_back(KNOWN, H200.slug)
        lookups.watcher.refresh()
        assert not lookups.remembered(KNOWN)
        store.pin(KNOWN, H200.slug, 1)  # what is served and pinned already
        lookups.watcher.refresh()
        assert lookups.look_up(KNOWN).revision == 1


def test_packs_that_come_and_go_change_what_answers_name(lookups: Lookups, store_url: str) -> None:
    found = present(lookups.look_up(KNOWN).config)
    assert found.pack is None
    lookups.keep(KNOWN, FAR)
    with changes(lookups, store_url) as store:
        for pack in ("a" * 64, "b" * 64):
            store.add_pack(pack, "toolchain", [found.kernel], 1000)
            lookups.watcher.refresh()
            assert lookups.remembered(KNOWN, FAR) == {FAR}
            named = present(lookups.look_up(KNOWN).config)
            assert named.pack == pack
        store.remove_pack("b" * 64)
        lookups.watcher.refresh()
        assert lookups.remembered(KNOWN, FAR) == {FAR}
        named = present(lookups.look_up(KNOWN).config)
        assert named.pack == "a" * 64


def test_the_same_winner_with_another_pack_is_another_answer(
    lookups: Lookups, store_url: str
) -> None:
    lookups.keep(KNOWN, FAR)
    with changes(lookups, store_url) as store:
        store.promote(replace(serving.winner(KNOWN), pack="c" * 64))
    assert lookups.remembered(KNOWN, FAR) == {FAR}
    named = lookups.look_up(KNOWN)
    assert named.config is not None
    assert (named.config.pack, named.revision) == ("c" * 64, 1)


def test_a_new_device_model_is_known_at_once_and_drops_all(
    lookups: Lookups, store_url: str
) -> None:
    lookups.keep(KNOWN, FAR)
    assert lookups.catalogue.known() == [H200]
    with changes(lookups, store_url) as store:
        store.promote(serving.winner(KNOWN, device=H100))
    assert lookups.remembered(KNOWN, FAR) == set()
    assert lookups.catalogue.resolve(None, None) == H100  # the first by name


def test_a_gpu_with_other_software_drops_all(lookups: Lookups, store_url: str) -> None:
    lookups.keep(KNOWN, FAR)
    with changes(lookups, store_url) as store:
        store.gpus.report(H200, NEWER)
    assert lookups.remembered(KNOWN, FAR) == set()
    assert lookups.look_up(KNOWN).stale
    with changes(lookups, store_url) as store:
        store.gpus.report(H200, NEWER)  # again: nothing new
    assert lookups.remembered(KNOWN) == {KNOWN}


def test_so_many_changes_at_once_drop_all(
    lookups: Lookups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.lookup.watcher._MANY", 3)
    lookups.keep(KNOWN, FAR)
    for m in (64, 128, 192):
        lookups.store.promote(serving.winner(Problem(m=m, n=8192, k=64)))
    lookups.watcher.refresh()
    assert lookups.remembered(KNOWN, FAR) == set()


def test_an_older_copy_of_the_database_drops_all(
    lookups: Lookups, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = lookups.store.changes.marks()
    lookups.store.promote(serving.winner(KNOWN, us=5.0))
    lookups.watcher.refresh()
    lookups.keep(KNOWN, FAR)
    monkeypatch.setattr(lookups.store.changes, "marks", lambda: before)
    lookups.watcher.refresh()
    assert lookups.remembered(KNOWN, FAR) == set()


def test_a_look_that_fails_half_way_is_made_again(
    lookups: Lookups, monkeypatch: pytest.MonkeyPatch
) -> None:
    lookups.keep(KNOWN, FAR)
    lookups.store.promote(serving.winner(KNOWN, us=5.0))

    def fail(*_: object) -> Sequence[object]:
        raise StoreError("the connection is lost")

    with monkeypatch.context() as patch:
        patch.setattr(lookups.store.changes, "winners_since", fail)
        with pytest.raises(StoreError):
            lookups.watcher.refresh()
    lookups.watcher.refresh()
    assert lookups.remembered(KNOWN, FAR) == {FAR}


def test_what_another_process_does_is_seen_in_a_moment(store: Store, store_url: str) -> None:
    store.promote(serving.winner(KNOWN))
    lookups = lookups_of(store)
    with lookups.watcher:
        lookups.keep(KNOWN, FAR)
        pin = ["winners", "pin", *("4096", "4096", "4096", "1"), "--database", store_url]
        subprocess.run(
            [sys.executable, "-m", "service.cli", *pin], cwd=ROOT, check=True, capture_output=True
        )
        pinned_at = time.monotonic()
        until(lambda: not lookups.remembered(KNOWN), "the pin was not seen")
        assert time.monotonic() - pinned_at < 1
        assert lookups.remembered(FAR) == {FAR}
        assert lookups.look_up(KNOWN).pinned


def test_while_the_database_is_away_memory_serves_and_the_log_says_so_once(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    away = False
    real = Changes.marks

    def marks(changes: Changes) -> Marks:
        nonlocal looks
        looks += 1
        if away:
            raise StoreError("the server has gone away")
        return real(changes)

    monkeypatch.setattr(Changes, "marks", marks)

    def looked(times: int) -> None:
        until(lambda since=looks: looks >= since + times, "nobody looks")  # type: ignore[misc]

    with Store.open(sqlite_url) as store, structlog.testing.capture_logs() as log:
        store.promote(serving.winner(KNOWN))
        lookups = lookups_of(store)
        with lookups.watcher:
            lookups.keep(KNOWN)
            away = True
            looked(3)
            store.promote(serving.winner(KNOWN, us=5.0))
            assert lookups.remembered(KNOWN) == {KNOWN}
            with pytest.raises(StoreError):
                lookups.watcher.refresh()
            assert said(log) == ["warning"]
            away = False
            until(lambda: not lookups.remembered(KNOWN), "the promotion was not seen")
            looked(2)
            assert said(log) == ["warning", "info"]
            assert "served from memory" in log[0]["event"]
            assert log[0]["error"] == "the server has gone away"


def said(log: list[EventDict]) -> list[str]:
    return [line["log_level"] for line in log if "database" in line["event"]]


def test_a_fault_does_not_end_the_looking(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.open(sqlite_url) as store, structlog.testing.capture_logs() as log:
        store.promote(serving.winner(KNOWN))
        lookups = lookups_of(store)
        with lookups.watcher:
            lookups.keep(KNOWN)
            with monkeypatch.context() as patch:
                patch.setattr(store.changes, "marks", lambda: 1 / 0)
                until(lambda: said(log) == ["warning"], "the fault is not in the log")
            assert log[0]["exc_info"] is True
            store.promote(serving.winner(KNOWN, us=5.0))
            until(lambda: not lookups.remembered(KNOWN), "nobody looks any more")


def test_a_look_costs_little(lookups: Lookups) -> None:
    for m in range(64, 64 + 40):
        lookups.store.promote(serving.winner(Problem(m=m, n=64, k=64)))
    lookups.watcher.refresh()
    began = time.process_time()
    for _ in range(20):
        lookups.watcher.refresh()
    assert (time.process_time() - began) / 20 < EVERY_S / 5
