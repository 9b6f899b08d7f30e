"""The worker's device: entered once for a queue of jobs, left when idle."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemmsmith.core.problem import Problem
from gemmsmith.core.tuning import Effort, JobState
from service.worker import process
from tests.support.present import present
from tests.support.recordings import record
from tests.support.serving import new_settings
from tuner.devices.replay import ReplayDevice
from tuner.jobs import Queue
from tuner.store import Store

PROBLEMS = [Problem(m=256, n=4096, k=4096), Problem(m=512, n=4096, k=4096)]


def test_a_queue_of_jobs_enters_the_device_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = new_settings(tmp_path, device="replay:h200")
    record(settings.sweeps, *PROBLEMS)
    calls: list[str] = []
    enter, leave = ReplayDevice.__enter__, ReplayDevice.__exit__
    monkeypatch.setattr(
        ReplayDevice, "__enter__", lambda self: calls.append("enter") or enter(self)
    )
    monkeypatch.setattr(
        ReplayDevice, "__exit__", lambda self, *_: calls.append("leave") or leave(self, *_)
    )
    with Store.open(settings.database) as store:
        for problem in PROBLEMS:
            Queue(store).enqueue(problem, effort=Effort.QUICK, device="")
    assert process.run(settings, until_idle=True) == 2
    assert calls == ["enter", "leave"]
    with Store.open(settings.database) as store:
        assert {job.state for job in Queue(store).list()} == {JobState.DONE}


def test_an_idle_worker_leaves_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = new_settings(tmp_path, device="replay:h200")
    record(settings.sweeps, PROBLEMS[0])
    monkeypatch.setattr(process, "KEEP_DEVICE_S", 0.0)
    with Store.open(settings.database) as store:
        device = process.open_worker_device(settings)
        left: list[bool] = []
        monkeypatch.setattr(ReplayDevice, "close", lambda _: left.append(True))
        tuning = process.Tuning(settings, store, device)
        Queue(store).enqueue(PROBLEMS[0], effort=Effort.QUICK, device="")
        leased = present(Queue(store).lease("me", [device.model.slug, device.name]))
        tuning.idle()
        assert left == []  # never entered
        tuning(leased)
        tuning.idle()
        tuning.idle()
        assert left == [True]
