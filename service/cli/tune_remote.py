"""`gemmsmith tune --url`: order jobs from a service and follow them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import inf

from gemmsmith.errors import JobCancelled, JobFailed
from gemmsmith.handles import TuningJob
from gemmsmith.jobs import JobStatus
from gemmsmith.tuning import Effort
from service.cli.jobs import tell_busy
from service.cli.options import connect
from service.cli.output import emit, note, say
from service.cli.progress import Reporter, reporter
from service.cli.tasks import Status, Task, TaskOutcome, by_stake, report


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
    """Order every task, then wait for each in turn; the exit status.

    Where the service's queue has no room, ordering waits for some: `time_limit` seconds in all, or
    for ever. After `deadline_s` seconds from its order a job without a winner fails.

    Tasks that say how often they are run are ordered with the largest first, as a worker may begin
    with the first one, and followed in the service's own order, which knows the winners there are.
    Interrupting this leaves the jobs in the service: they go on.

    Raises:
        GemmsmithError: the service is away or refuses.
    """
    began = time.monotonic()
    counted = any(task.calls for task in tasks)
    if counted:
        from tuner.search.demand import saving_us

        tasks = by_stake(tasks, lambda problem: saving_us(problem, None, []))
    with connect(url) as client:

        def order(task: Task) -> TuningJob:
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

        orders = [(task, order(task)) for task in tasks]
        if counted:
            orders.sort(key=lambda order: order[1].status.expected_saving_us or 0.0, reverse=True)
        if not wait:
            if as_json:
                fields = ("id", "state", "calls", "expected_saving_us")
                statuses = [job.status for _, job in orders]
                emit({"jobs": [{name: getattr(s, name) for name in fields} for s in statuses]})
            else:
                for task, job in orders:
                    say(f"{job.id}  {job.status.state}  {task.problem}")
                note(f"follow one with: curl -sN {client.url}/jobs/ID/events")
            return 0
        outcomes = []
        with reporter() as says:
            for i, (task, job) in enumerate(orders):
                says.overall(i, len(orders), f"{task.problem} {task.origin}".strip())
                outcomes.append(_follow(task, job, says))
                if whole:
                    says.line(f"  {outcomes[-1].line()}")
    return report(outcomes, whole=whole, as_json=as_json, seconds=time.monotonic() - began)


def _follow(task: Task, job: TuningJob, says: Reporter) -> TaskOutcome:
    def on_progress(status: JobStatus) -> None:
        says.update(
            status.phase or status.state,
            status.done,
            status.total,
            best_us=status.best_us,
        )

    began = time.monotonic()
    try:
        answer = job.wait(on_progress=on_progress)
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
    )
