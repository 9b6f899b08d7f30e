"""docs/fleet.md: its commands for one machine are run, on a real Ray and a recorded GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemmsmith.core.tuning import JobState
from tests.support.docs import ROOT, Session, steps, tools
from tests.support.serving import new_settings
from tests.support.shipped import SWEEPS
from tuner.jobs import Queue
from tuner.store import Store


@pytest.mark.long
def test_every_command_works_as_printed(tmp_path: Path) -> None:
    settings = new_settings(tmp_path, sweeps=SWEEPS, device="")
    session = Session(tmp_path, {**settings.environment(), **tools()}, {})
    for step in steps(ROOT / "docs" / "fleet.md"):
        session.run(step)
    with Store.open(settings.database) as store:
        counts = Queue(store).counts()
        assert (counts[JobState.DONE], counts[JobState.WAITING]) == (3, 3)
        owners = [
            event.data["owner"]
            for job in Queue(store).list(JobState.DONE)
            for event in Queue(store).events(job.id)
            if event.kind == "started"
        ]
        assert len(owners) == 3
        assert all(owner.startswith("fleet-") for owner in owners)
