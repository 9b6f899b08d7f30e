"""`gemmsmith fleet` on this machine's GPU: its actor measures, its tasks compile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gemmsmith.core.problem import Problem
from gemmsmith.core.tuning import Effort, JobState
from tests.support.compiled import kept
from tests.support.serving import new_settings
from tuner.jobs import Queue
from tuner.store import Store

PROBLEMS = [Problem(m=384, n=1536, k=1024), Problem(m=512, n=1536, k=1024)]


def test_a_fleet_of_one_gpu_tunes_what_is_ordered(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[fleet]'")
    settings = new_settings(tmp_path, packs=kept(), device="cuda:0")
    with Store.open(settings.database) as store:
        queue = Queue(store)
        jobs = [queue.enqueue(problem, effort=Effort.QUICK)[0].id for problem in PROBLEMS]
        done = subprocess.run(
            [
                *(sys.executable, "-m", "service.cli", "fleet"),
                *("--address", "local", "--until-idle", "--cores", "4"),
            ],
            env={**os.environ, **settings.environment()},
            capture_output=True,
            text=True,
            timeout=580,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        for job, problem in zip(jobs, PROBLEMS, strict=True):
            assert queue.get(job).state is JobState.DONE, queue.get(job).error
            events = queue.events(job, limit=10_000)
            owners = [event.data["owner"] for event in events if event.kind == "started"]
            assert ":compile:" in owners[0]
            assert ":GPU:" in owners[-1]
            winner = next(
                each
                for model in store.devices()
                if (each := store.winner(problem, model.slug)) is not None
            )
            assert not winner.replayed
            assert winner.job == job
