"""`/ui/jobs`: tuning jobs, and one job as it runs.

A job's page shows what is known when it is rendered; `static/job.js` then follows the job's event
stream, and without scripts the page is loaded again every few seconds until the job is over.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from markupsafe import Markup
from starlette.responses import Response

from gemmsmith.core.tuning import JobState
from service.charts.trials import convergence
from service.http.access import Scope, needs
from service.http.errors import invalid_field, not_found
from service.http.routes import jobs as api
from service.http.state import Service, State
from service.pages import addresses
from service.pages.callers import Reader, Tuner
from service.pages.fields import Blank, Text
from service.pages.render import fragment, page, see_other
from tuner.errors import JobNotFound
from tuner.jobs import Job
from tuner.trial import Winner

router = APIRouter(include_in_schema=False, prefix=addresses.JOBS)

PAGE = 50
EVENTS = 1_000
"""Events shown at most; a job has a few a second while it runs."""


@router.get("")
def jobs(
    service: Service,
    caller: Reader,
    state: Annotated[JobState | None, Blank, Query()] = None,
    after: Text = None,
) -> Response:
    """Jobs, newest first."""
    try:
        found = service.queue.list(state=state, after=after, limit=PAGE + 1)
    except JobNotFound as error:
        raise invalid_field("after", str(error), "the id of a job") from error
    following = None
    if len(found) > PAGE:
        following = addresses.with_query(addresses.JOBS, state=state, after=found[PAGE - 1].id)
    return page(
        "jobs.html",
        nav=addresses.JOBS,
        caller=caller,
        jobs=found[:PAGE],
        state=state,
        states=service.queue.counts(),
        workers=service.queue.workers.alive(),
        first=after is None,
        restart=addresses.with_query(addresses.JOBS, state=state),
        following=following,
    )


@router.get("/{job_id}")
def job(service: Service, caller: Reader, job_id: str) -> Response:
    """One job, live."""
    found = _get(service, job_id)
    events = service.queue.events(found.id, limit=EVENTS)
    device = next((e.data.get("device") for e in reversed(events) if e.kind == "winner"), None)
    if device is None:
        known = service.catalogue.resolve(None, None)
        device = found.device or (known.slug if known else None)
    slugs = {model.slug for model in service.catalogue.known()}
    return page(
        "job.html",
        nav=addresses.JOBS,
        caller=caller,
        job=found,
        events=events,
        workers=service.queue.workers.alive(),
        convergence=_convergence(service, found),
        served=_served(service, found, device),
        device=device if device in slugs else None,
        final=found.state.terminal,
        retryable=found.state in (JobState.FAILED, JobState.CANCELLED),
        changeable=api.may_change(caller, found),
    )


@router.get("/{job_id}/convergence", dependencies=[needs(Scope.READ)])
def progress(service: Service, job_id: str) -> Response:
    """The chart of a job's page alone, for the script that keeps it current."""
    return fragment(_convergence(service, _get(service, job_id)))


@router.post("/{job_id}/cancel")
def cancel(service: Service, caller: Tuner, job_id: str) -> Response:
    """Ask for cancellation, as `DELETE /jobs/{id}` does."""
    api.cancel_job(service, caller, _get(service, job_id).id)
    return see_other(addresses.job(job_id))


@router.post("/{job_id}/retry")
def retry(service: Service, caller: Tuner, job_id: str) -> Response:
    """Request anew, as `POST /jobs/{id}/retry` does; on to the new job."""
    reply = api.retry_job(service, caller, _get(service, job_id).id)
    return see_other("/ui" + reply.headers["location"])


def _convergence(service: State, shown: Job) -> Markup:
    result_us = shown.best_us if shown.state is JobState.DONE else None
    return convergence(service.store.tried.of_job(shown.id), result_us)


def _served(service: State, shown: Job, device: str | None) -> Winner | None:
    """What is served instead of the job's own result; None if that is served."""
    winner = service.store.winner(shown.problem, device or "") if shown.winner_revision else None
    return None if winner is None or winner.revision == shown.winner_revision else winner


def _get(service: State, job_id: str) -> Job:
    try:
        return service.queue.get(job_id)
    except JobNotFound:
        links = {"jobs": {"href": addresses.JOBS}}
        raise not_found("Job", f"There is no job {job_id!r:.80}.", links) from None
