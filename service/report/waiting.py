"""Says in words for people what a waiting job waits for."""

from __future__ import annotations

from collections.abc import Sequence

from tuner.jobs import Job, LivingWorker, taker


def waiting(job: Job, workers: Sequence[LivingWorker]) -> str:
    """Say what a waiting job waits for; `workers` are all that are alive."""
    if not workers:
        return "waits: no worker is alive; start one with gemmsmith worker"
    worker = taker(workers, job)
    if worker is None:
        return f"waits: no worker that is alive takes jobs for {job.device}"
    if worker.job is not None:
        return f"waits its turn: the worker on {worker.host} has another job"
    return f"waits: the worker on {worker.host} runs it next"
