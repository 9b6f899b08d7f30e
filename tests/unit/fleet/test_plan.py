"""What a fleet should run, by what its machines have."""

from __future__ import annotations

from service.fleet.plan import Machine, Slot, compile_tasks, slots, to_start

A = Machine(id="a", resources={"CPU": 16.0, "GPU": 2.0, "memory": 1e9, "node:10.0.0.1": 1.0})
B = Machine(id="b", resources={"CPU": 7.0, "replay:h200": 1.0})


def test_each_gpu_real_or_recorded_has_a_slot() -> None:
    assert slots([B, A]) == [
        Slot(machine="a", resource="GPU", number=0),
        Slot(machine="a", resource="GPU", number=1),
        Slot(machine="b", resource="replay:h200", number=0),
    ]
    assert [slot.device for slot in slots([A, B])] == ["cuda:0", "cuda:0", "replay:h200"]


def test_a_worker_is_started_where_one_is_missing_and_none_has_just_failed() -> None:
    first, second, recorded = slots([A, B])
    assert to_start([first, second, recorded], {second}, {recorded}) == [first]


def test_compile_tasks_are_bounded_by_jobs_and_by_cores() -> None:
    assert compile_tasks([A, B], cores=4, due=100, running=0) == 5  # 4 on a, 1 on b
    assert compile_tasks([A, B], cores=4, due=100, running=3) == 2
    assert compile_tasks([A, B], cores=4, due=1, running=3) == 1
    assert compile_tasks([A, B], cores=4, due=0, running=0) == 0
    assert compile_tasks([A, B], cores=32, due=9, running=0) == 0
