"""SIGTERM to the service with its worker in the middle of a job: the job is handed back whole."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from gemmsmith.core.tuning import JobState
from tests.support.fleet import Fleet
from tests.support.ledger import verify
from tests.support.orders import accepted
from tests.support.processes import until
from tests.support.records import imported
from tests.support.shipped import recorded_problems, shipped_winners
from tuner.jobs import Queue
from tuner.store import Store
from tuner.trial import Phase


def test_the_next_worker_goes_on_at_once(store: Store, store_url: str, tmp_path: Path) -> None:
    imported(store, shipped_winners()[0])
    queue = Queue(store)
    orders = [
        {"m": problem.m, "n": problem.n, "k": problem.k, "dtype": problem.dtype, "effort": "quick"}
        for problem in recorded_problems()[:2]
    ]

    def screened(job: str) -> int:
        return len(store.trials(job=job, phase=Phase.SCREEN))

    # A lease that outlives the test: nobody comes by the job unless it was handed back.
    with Fleet(
        store_url, tmp_path, GEMMSMITH_TEST_TTL_S="600", GEMMSMITH_TEST_PAUSE_S="0.3"
    ) as fleet:
        fleet.serve(worker=True)
        fleet.wait_until_up()
        fleet.wait_until_ready(1)
        jobs = [accepted(fleet.client, order, str(n)) for n, order in enumerate(orders)]
        until(lambda: screened(jobs[0]) >= 2, "the job does not begin")
        assert fleet.end() == 0
        assert fleet.processes() == []
        handed_back, untouched = map(queue.get, jobs)
        before = screened(jobs[0])
        assert (handed_back.state, handed_back.error) == (JobState.WAITING, None)
        assert (untouched.state, untouched.attempt) == (JobState.WAITING, 0)
        fleet.work()
        fleet.wait_until_idle()
    assert verify(store_url, jobs) == {"done": 2}
    assert queue.get(jobs[0]).attempt == 2
    assert before < screened(jobs[0])
    keys = Counter(
        stored.trial.candidate.key for stored in store.trials(job=jobs[0], phase=Phase.SCREEN)
    )
    assert set(keys.values()) == {1}
