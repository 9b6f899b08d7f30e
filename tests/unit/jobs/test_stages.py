"""Jobs that one worker compiles for and another one measures, on SQLite and on PostgreSQL."""

from __future__ import annotations

import pytest

from gemmsmith.core.tuning import JobState
from tests.support.records import PROBLEM
from tests.support.replacing import replace
from tuner.errors import LeaseLost
from tuner.jobs import LeasedJob, Queue
from tuner.jobs.rechecks import IDLE_PRIORITY, Rechecks
from tuner.jobs.stages import Notes, Stage, StagedQueue, hand_to_compilers, hand_to_gpus
from tuner.store import Store


def lease(store: Store, stage: Stage | None, owner: str = "w") -> LeasedJob | None:
    return StagedQueue(store, stage).lease(owner, ["h200"], 60.0)


def leased(store: Store, stage: Stage | None, owner: str = "w") -> LeasedJob:
    taken = lease(store, stage, owner)
    assert taken is not None
    return taken


def test_a_job_goes_from_the_compilers_to_the_gpus_and_back(store: Store) -> None:
    job, _ = Queue(store).enqueue(PROBLEM, device="h200")
    assert lease(store, Stage.MEASURE) is None
    compiler = leased(store, Stage.COMPILE)
    assert lease(store, Stage.COMPILE) is None
    hand_to_gpus(compiler, ["p1"], {"bad": "error: no"})
    assert lease(store, Stage.COMPILE) is None
    gpu = leased(store, Stage.MEASURE)
    queue = StagedQueue(store, Stage.MEASURE)
    assert queue.notes(job.id) == Notes(packs=("p1",), failures={"bad": "error: no"})
    hand_to_compilers(gpu, ["a", "b"])
    assert lease(store, Stage.MEASURE) is None
    assert queue.notes(job.id).wanted == ("a", "b")
    hand_to_gpus(leased(store, Stage.COMPILE), ["p2", "p1"], {})
    notes = queue.notes(job.id)
    assert (notes.packs, notes.rounds) == (("p1", "p2"), 1)
    assert notes.failures == {"bad": "error: no"}
    leased(store, Stage.MEASURE).complete(None)
    assert queue.get(job.id).state is JobState.DONE
    assert queue.get(job.id).attempt == 4


def test_handing_over_costs_no_attempt(store: Store) -> None:
    job, _ = Queue(store).enqueue(PROBLEM, device="h200")
    for _ in range(5):
        hand_to_gpus(leased(store, Stage.COMPILE), [], {})
        hand_to_compilers(leased(store, Stage.MEASURE), ["a"])
    assert Queue(store).get(job.id).state is JobState.WAITING


def test_a_worker_of_no_stage_takes_any_job(store: Store) -> None:
    Queue(store).enqueue(PROBLEM)
    Queue(store).enqueue(replace(PROBLEM, m=64))
    hand_to_gpus(leased(store, Stage.COMPILE), [], {})
    assert StagedQueue(store, None).due(["h200"]) == 2
    assert StagedQueue(store, Stage.COMPILE).due(["h200"]) == 1
    assert StagedQueue(store, Stage.MEASURE).due(["h200"]) == 1
    assert StagedQueue(store, Stage.MEASURE).due(["h100"]) == 1  # for any device
    assert leased(store, None)
    assert leased(store, None)
    assert lease(store, None) is None


def test_a_job_whose_gpu_died_in_the_middle_is_a_gpus(store: Store) -> None:
    Queue(store).enqueue(PROBLEM)
    hand_to_gpus(leased(store, Stage.COMPILE), [], {})
    dying = leased(store, Stage.MEASURE, "dead")
    dying.progress("screen", 1, 2)
    queue = StagedQueue(store, Stage.COMPILE)
    assert queue.lapse(["somebody else"]) == 0
    assert queue.lapse(["dead"]) == 1
    assert queue.lapse(["dead"]) == 0
    assert lease(store, Stage.COMPILE) is None
    again = leased(store, Stage.MEASURE)
    assert again.job.attempt == 3
    with pytest.raises(LeaseLost):
        dying.complete(None)
    again.complete(None)


def test_a_worker_that_only_seemed_dead_goes_on(store: Store) -> None:
    job, _ = Queue(store).enqueue(PROBLEM)
    alive = leased(store, None, "alive")
    assert StagedQueue(store, None).lapse(["alive"]) == 1
    alive.heartbeat()
    assert lease(store, None) is None
    alive.complete(None)
    assert Queue(store).get(job.id).state is JobState.DONE


def test_idle_work_gives_way_to_what_can_be_measured_only(store: Store) -> None:
    plain, staged = Queue(store), StagedQueue(store, Stage.MEASURE)
    plain.enqueue(PROBLEM, device="h200", priority=IDLE_PRIORITY)
    hand_to_gpus(leased(store, Stage.COMPILE), [], {})
    idle = leased(store, Stage.MEASURE)
    plain.enqueue(replace(PROBLEM, m=64), device="h200")
    assert Rechecks(store, plain, "h200", "cuda:0").outranked(idle.job)
    assert not Rechecks(store, staged, "h200", "cuda:0").outranked(idle.job)
    hand_to_gpus(leased(store, Stage.COMPILE), [], {})
    assert Rechecks(store, staged, "h200", "cuda:0").outranked(idle.job)
