"""The same snapshot on all ranks: real processes with gloo, with and without a warm cache."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import gemmsmith
from gemmsmith import (
    Client,
    GemmsmithError,
    PackUntrusted,
    ServiceUnavailable,
    Snapshot,
    SnapshotUnavailable,
)
from gemmsmith.distributed import agreed_snapshot, shared_snapshot
from tests.support.processes import in_threads
from tests.support.snapshots import BIG, row, snapshot
from tests.unit.client.misbehaving import Misbehaving, Say

WINNERS = snapshot(row(BIG))


MET = "met"


def _run(
    rank: int, meeting: str, answer: Connection, task: Callable[..., Any], *arguments: object
) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    answer.send(MET)
    try:
        answer.send(task(rank, *arguments))
    except BaseException as error:  # noqa: BLE001 - what it was is the test's to judge
        answer.send((type(error).__name__, str(error), "".join(traceback.format_exception(error))))
    finally:
        dist.destroy_process_group()


def on_two_ranks(folder: Path, task: Callable[..., Any], *arguments: object) -> list[Any]:
    """The results of the task on each rank. Repeated if gloo's ranks fail to connect."""
    folder.mkdir(exist_ok=True)
    for attempt in range(3):
        with _two_ranks(folder / f"meeting-{attempt}", task, *arguments) as ends:
            if all(_has_met(end) for end in ends):
                results = []
                for end in ends:
                    assert end.poll(90), "a rank hangs"
                    results.append(end.recv())
                return results
            ends.clear()  # no process is left to wait for
    pytest.fail("gloo's two ranks did not meet in three attempts")


def _has_met(end: Connection) -> bool:
    try:
        return end.poll(40) and end.recv() == MET
    except EOFError:  # its process has ended because the other rank was missing
        return False


@contextmanager
def _two_ranks(
    meeting: Path, task: Callable[..., Any], *arguments: object
) -> Iterator[list[Connection]]:
    context = multiprocessing.get_context("spawn")
    ends, workers = [], []
    for rank in range(2):
        receiver, sender = context.Pipe(duplex=False)
        worker = context.Process(target=_run, args=(rank, str(meeting), sender, task, *arguments))
        worker.start()
        sender.close()
        ends.append(receiver)
        workers.append(worker)
    try:
        yield ends
    finally:
        for worker in workers:
            worker.join(20 if ends else 0)
            worker.kill()


def _from_caches(rank: int, url: str, folders: tuple[str, str]) -> tuple[str, str, bool]:
    asked = False

    def fetch() -> Snapshot:
        nonlocal asked
        asked = True
        with Client(url, cache_dir=folders[rank], retries=0, timeout=5) as client:
            return client.snapshot()

    shared = shared_snapshot(fetch)
    assert shared is not None
    choice = shared.find(BIG)
    assert choice is not None
    return shared.revision, choice.config.kernel.name, asked


AWAY = ServiceUnavailable("no answer from anywhere")


def _failing(rank: int, error: BaseException) -> object:
    def fetch() -> Snapshot:
        raise error

    return shared_snapshot(fetch)


def _nothing(rank: int) -> object:
    return shared_snapshot(lambda: None)


def _in_a_group(rank: int) -> object:
    """The group's rank 0 is the job's rank 1."""
    import torch.distributed as dist

    group = dist.new_group([1])
    if rank == 0:
        return "outside"
    shared = shared_snapshot(lambda: WINNERS, group)
    return shared and shared.revision


@pytest.mark.parametrize("warm", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_warm_and_a_cold_rank_choose_the_same(
    tmp_path: Path, server: Misbehaving, warm: int
) -> None:
    folders = (str(tmp_path / "0"), str(tmp_path / "1"))
    server.say(Say(body=WINNERS.document))
    with Client(server.url, cache_dir=folders[warm]) as client:
        assert client.snapshot() == WINNERS
    if warm == 0:  # only the first rank has a cache, and it must suffice
        server.stop()
    results = on_two_ranks(tmp_path / "job", _from_caches, server.url, folders)
    name = WINNERS.rows[0].config.kernel.name  # type: ignore[union-attr]
    assert results == [(WINNERS.revision, name, True), (WINNERS.revision, name, False)]


@pytest.mark.long
def test_all_ranks_raise_the_same_error(tmp_path: Path) -> None:
    kinds, messages, _ = zip(*on_two_ranks(tmp_path, _failing, AWAY), strict=True)
    assert set(kinds) == {"SnapshotUnavailable"}
    assert set(messages) == {
        "rank 0 could not fetch the snapshot: ServiceUnavailable: no answer from anywhere"
    }


@pytest.mark.long
def test_an_interrupt_on_rank_0_lets_the_others_go(tmp_path: Path) -> None:
    results = on_two_ranks(tmp_path, _failing, KeyboardInterrupt())
    assert [kind for kind, *_ in results] == ["KeyboardInterrupt", "SnapshotUnavailable"]


@pytest.mark.long
def test_without_a_snapshot_all_ranks_get_none(tmp_path: Path) -> None:
    assert on_two_ranks(tmp_path, _nothing) == [None, None]


@pytest.mark.long
def test_a_group_has_its_own_rank_0(tmp_path: Path) -> None:
    assert on_two_ranks(tmp_path, _in_a_group) == ["outside", WINNERS.revision]


def _refused_by_one(rank: int) -> object:
    def check(snapshot: Snapshot) -> None:
        assert snapshot == WINNERS
        if rank == 1:
            raise PackUntrusted("it is not signed")

    return shared_snapshot(lambda: WINNERS, check=check)


@pytest.mark.long
def test_no_rank_runs_a_snapshot_that_another_rank_does_not_trust(tmp_path: Path) -> None:
    kinds, messages, _ = zip(*on_two_ranks(tmp_path, _refused_by_one), strict=True)
    assert set(kinds) == {"SnapshotUnavailable"}
    assert set(messages) == {"rank 1 does not take the snapshot: PackUntrusted: it is not signed"}


def test_without_a_process_group_this_process_is_rank_0() -> None:
    assert shared_snapshot(lambda: WINNERS) == WINNERS
    assert shared_snapshot(lambda: None) is None
    with pytest.raises(SnapshotUnavailable, match="no answer") as caught:
        _failing(0, AWAY)
    assert isinstance(caught.value.__cause__, ServiceUnavailable)


def _compared(rank: int) -> tuple[float, float, float]:
    def step() -> None:
        time.sleep(0.001 * (1 + rank))

    gain = gemmsmith.compare(step, tuned=step, blocks=6, steps=1)
    return gain.median, gain.ci_low, gain.ci_high


@pytest.mark.long
def test_all_ranks_get_the_same_result_of_compare(tmp_path: Path) -> None:
    first, second = on_two_ranks(tmp_path, _compared)
    assert first == second
    assert 0 < first[1] <= first[0] <= first[2]


def _replaced_nothing(rank: int) -> tuple[str, int]:
    steps: list[int] = []
    with pytest.raises(GemmsmithError) as refused:
        gemmsmith.compare(lambda: steps.append(rank), blocks=6, steps=1)
    return str(refused.value), len(steps)


@pytest.mark.long
def test_ranks_agree_that_nothing_was_replaced(tmp_path: Path) -> None:
    said = "gemmsmith.compare: both sides would run torch: call gemmsmith.use(...) first"
    assert on_two_ranks(tmp_path, _replaced_nothing) == [(said, 6)] * 2


def agree(
    *ranks: Callable[[Snapshot], None], fetch: Callable[[], Snapshot] = lambda: WINNERS, world: int
) -> list[Snapshot | str]:
    """The snapshot or the error of each rank. Ranks are threads with the same store."""
    from torch.distributed import HashStore

    store, outcomes = HashStore(), dict[int, Snapshot | str]()

    def rank(number: int, check: Callable[[Snapshot], None]) -> None:
        try:
            outcomes[number] = agreed_snapshot(
                fetch, store, number, world, check=check, timeout_s=2.0
            )
        except SnapshotUnavailable as error:
            outcomes[number] = str(error)

    in_threads(*(partial(rank, *numbered) for numbered in enumerate(ranks)))
    return [outcomes[number] for number in range(len(ranks))]


def takes(_: Snapshot) -> None:
    """Accepts every snapshot."""


def refuses(_: Snapshot) -> None:
    raise PackUntrusted("its signer is unknown")


def goes() -> Snapshot:
    raise ServiceUnavailable("no answer")


def test_all_ranks_agree_by_the_store_alone() -> None:
    assert agree(takes, takes, takes, world=3) == [WINNERS] * 3


def test_no_rank_runs_a_snapshot_that_another_rank_refuses() -> None:
    one, other = agree(takes, refuses, world=2)
    assert one == other
    assert "rank 1 does not take the snapshot: PackUntrusted: its signer is unknown" in str(one)


def test_all_ranks_fail_if_rank_0_gets_no_snapshot() -> None:
    assert (
        agree(takes, takes, fetch=goes, world=2)
        == ["rank 0 could not fetch the snapshot: ServiceUnavailable: no answer"] * 2
    )


def test_a_rank_that_times_out_decides_for_all() -> None:
    one, other = agree(takes, takes, world=3)  # the third rank is missing
    assert one == other
    assert "waited 2 s for the other ranks" in str(one)
