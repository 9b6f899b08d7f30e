"""`gemmsmith tune --url`: request jobs of a service and follow them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import inf

from gemmsmith.core.tuning import Effort
from gemmsmith.errors import JobCancelled, JobFailed
from gemmsmith.http.client import Client
from gemmsmith.http.handles import TuningJob
from service.cli.follow import abandoned, show, waiting
from service.cli.jobs import tell_busy
from service.cli.options import connect
from service.cli.output import emit, note, say
from service.cli.progress import TUNING, Reporter, reporter
from service.cli.tasks import Status, Task, TaskOutcome, by_stake, not_served, report


def run(
    url: str,
    tasks: Sequence[Task],
    *,
    effort: Effort,
    priority: int,
    device: str | None,
    deadline_s: int | None,
    time_limit: float | None,
    wait: bool,
    as_json: bool,
    whole: bool,
) -> int:
    """Request every task, then wait for each in turn; the exit status.

    Where the service's queue has no room, requests wait for some: `time_limit` seconds in all, or
    for ever. After `deadline_s` seconds from its request a job without a winner fails.

    Tasks that say how often they are run are requested with the largest first, as a worker may
    begin with the first one, and followed in the service's own order, which knows the winners.

    Raises:
        GemmsmithError: the service is away or refuses.
        KeyboardInterrupt: it was stopped; says how to cancel the jobs, which go on.
    """
    began = time.monotonic()
    counted = any(task.calls for task in tasks)
    if counted:
        from tuner.search.demand import saving_us

        tasks = by_stake(tasks, lambda problem: saving_us(problem, None, []))
    with connect(url) as client:

        def request(task: Task) -> TuningJob:
            left = inf if time_limit is None else began + time_limit - time.monotonic()
            return client.tune(
                *(task.problem.m, task.problem.n, task.problem.k),
                batch=task.problem.batch,
                dtype=task.problem.dtype,
                layout=task.problem.layout,
                effort=effort,
                priority=priority,
                device=device,
                calls=task.calls,
                deadline_s=deadline_s,
                timeout=max(0.0, left),
                on_busy=tell_busy,
            )

        requests = [(task, request(task)) for task in tasks]
        if counted:
            requests.sort(key=lambda each: each[1].status.expected_saving_us or 0.0, reverse=True)
        if not wait:
            if as_json:
                fields = ("id", "state", "calls", "expected_saving_us")
                statuses = [job.status for _, job in requests]
                emit({"jobs": [{name: getattr(s, name) for name in fields} for s in statuses]})
            else:
                for task, job in requests:
                    say(f"{job.id}  {job.status.state}  {task.problem}")
                if requests and (waits := client.job_status(requests[0][1].id).waits):
                    note(f"the first one {waits}")
                note(f"follow one with: gemmsmith jobs watch ID --url {client.url}")
            return 0
        outcomes: list[TaskOutcome] = []
        try:
            with reporter(TUNING) as says:
                for i, (task, job) in enumerate(requests):
                    says.overall(i, len(requests), f"{task.problem} {task.origin}".strip())
                    outcomes.append(_follow(client, task, job, says))
                    if whole:
                        says.line(f"  {outcomes[-1].line()}")
        except KeyboardInterrupt:
            left = [job.id for _, job in requests[len(outcomes) :]]
            raise KeyboardInterrupt(abandoned(left, ("--url", url))) from None
    return report(outcomes, whole=whole, as_json=as_json, seconds=time.monotonic() - began)


def _follow(client: Client, task: Task, job: TuningJob, says: Reporter) -> TaskOutcome:
    began = time.monotonic()
    try:
        with waiting(lambda: client.job_status(job.id), ("--url", client.url), says):
            answer = job.wait(on_progress=lambda status: show(status, says))
    except (JobFailed, JobCancelled) as error:
        return TaskOutcome(
            task=task,
            status=Status.FAILED,
            error=str(error),
            job=job.id,
            seconds=time.monotonic() - began,
        )
    return TaskOutcome(
        task=task,
        status=Status.TUNED,
        result=answer,
        job=job.id,
        seconds=time.monotonic() - began,
        kept=not_served(answer.revision, answer.served),
    )
