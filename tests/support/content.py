"""Content for the tests of the pages: all kinds of winners, trials, a history, jobs."""

from __future__ import annotations

from pathlib import Path

from gemmsmith.answers.answer import Ratio
from gemmsmith.core.config import Use
from gemmsmith.core.problem import DType, Problem
from tests.support.records import imported
from tests.support.replacing import replace
from tests.support.serving import H200, trial, winner
from tuner.exchange import read_winners
from tuner.jobs import Queue
from tuner.store import Store
from tuner.trial import Failure, FailureKind, Phase

RECORDED = Problem(m=512, n=1024, k=2048)
TRIED = Problem(m=4096, n=4096, k=4096)
BATCHED = Problem(m=128, n=128, k=64, batch=8, dtype=DType.FP16)
CUBLAS_WINS = Problem(m=512, n=512, k=8192)
HOPELESS = Problem(m=7, n=7, k=7)
OTHER = replace(H200, name="NVIDIA H800")
SHIPPED = Path(__file__).parents[2] / "configs" / "winners" / "nvidia-h200-132sm.bf16.jsonl"


def fill(store: Store) -> None:
    """Add winners for two pages of the list, a winner with a history, trials and failures."""
    for i in range(52):
        made = winner(Problem(m=64 + i, n=1024, k=1024, dtype=DType.FP16), us=5.0 + i)
        faster = Ratio(median=1.2 + i / 100, ci_low=1.19 + i / 100, ci_high=1.21 + i / 100)
        store.promote(replace(made, speedup=faster))
    for shipped in [*read_winners(SHIPPED)][:6]:
        imported(store, shipped)
    store.promote(winner(CUBLAS_WINS, use=Use.CUBLAS, us=14.0))
    store.promote(winner(BATCHED, us=3.0))
    store.promote(winner(TRIED, device=OTHER, us=250.0))
    nothing = replace(winner(HOPELESS), candidate=None, statistics=None, speedup=None)
    store.promote(replace(nothing, correctness=None, use=Use.CUBLAS))
    store.promote(winner(TRIED, us=195.0))
    store.promote(winner(TRIED, us=190.0))
    for i in range(4):
        store.add_trial(trial(TRIED, i))
    final = replace(trial(TRIED), phase=Phase.FINAL, samples_us=(9.9, 10.0, 10.1) * 8)
    refused = Failure(kind=FailureKind.WRONG, message="D[3, 5] is <b>wrong</b> by 0.25")
    store.add_trial(final)
    store.add_trial(replace(trial(TRIED, 5), statistics=None, samples_us=(), failure=refused))


def jobs_in_every_state(queue: Queue) -> dict[str, str]:
    jobs = {}
    for m, state in enumerate(("done", "failed", "running"), 1):
        jobs[state] = queue.enqueue(Problem(m=m, n=8, k=8))[0].id
        leased = queue.lease(f"test:{state}", [H200.slug], ttl_s=900)
        assert leased is not None
        leased.progress("screen", 3, 8, 12.5, "a candidate", "eight kernels")
        if state == "done":
            leased.complete(1)
        if state == "failed":
            leased.fail("nothing like it was recorded", retry=False)
    jobs["cancelled"] = queue.enqueue(Problem(m=4, n=8, k=8))[0].id
    queue.cancel(jobs["cancelled"])
    jobs["waiting"] = queue.enqueue(Problem(m=5, n=8, k=8), device="another-gpu")[0].id
    return jobs
