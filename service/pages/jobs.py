"""`/ui/jobs`: the tuning jobs, and a job's page.

A job's page shows the state at rendering. `static/job.js` then follows the job's event stream;
without scripts the page reloads every few seconds until the job is over.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from markupsafe import Markup
from starlette.responses import Response

from gemmsmith.core.tuning import JobState
from service.charts.trials import convergence
from service.errors import invalid_field, not_found
from service.http.access import Scope, needs
from service.http.routes import jobs as api
from service.http.state import Service, State
from service.pages import addresses
from service.pages.fields import Blank, Reader, Text, Tuner
from service.pages.render import fragment, page, see_other
from tuner.errors import JobNotFound
from tuner.jobs import Job
from tuner.trial import Winner

router = APIRouter(include_in_schema=False, prefix=addresses.JOBS)

PAGE = 50
EVENTS = 1_000
"""Most events shown; a running job has a few a second."""


@router.get("")
def jobs(
    service: Service,
    caller: Reader,
    state: Annotated[JobState | None, Blank, Query()] = None,
    after: Text = None,
) -> Response:
    """Jobs, newest first."""
    try:
        listed = service.queue.list(state=state, after=after, limit=PAGE + 1)
    except JobNotFound as error:
        raise invalid_field("after", str(error), "the id of a job") from error
    following = None
    if len(listed) > PAGE:
        following = addresses.with_query(addresses.JOBS, state=state, after=listed[PAGE - 1].id)
    return page(
        "jobs.html",
        nav=addresses.JOBS,
        caller=caller,
        jobs=listed[:PAGE],
        state=state,
        states=service.queue.counts(),
        workers=service.queue.workers.alive(),
        first=after is None,
        restart=addresses.with_query(addresses.JOBS, state=state),
        following=following,
    )


@router.get("/{job_id}")
def job(service: Service, caller: Reader, job_id: str) -> Response:
    """A job's page."""
    shown = _get(service, job_id)
    events = service.queue.events(shown.id, limit=EVENTS)
    device = next((e.data.get("device") for e in reversed(events) if e.kind == "winner"), None)
    if device is None:
        model = service.catalogue.resolve(None, None)
        device = shown.device or (model.slug if model else None)
    slugs = {model.slug for model in service.catalogue.known()}
    return page(
        "job.html",
        nav=addresses.JOBS,
        caller=caller,
        job=shown,
        events=events,
        workers=service.queue.workers.alive(),
        convergence=_convergence(service, shown),
        served=_served(service, shown, device),
        device=device if device in slugs else None,
        final=shown.state.terminal,
        retryable=shown.state in (JobState.FAILED, JobState.CANCELLED),
        changeable=api.may_change(caller, shown),
    )


@router.get("/{job_id}/convergence", dependencies=[needs(Scope.READ)])
def progress(service: Service, job_id: str) -> Response:
    return fragment(_convergence(service, _get(service, job_id)))


@router.post("/{job_id}/cancel")
def cancel(service: Service, caller: Tuner, job_id: str) -> Response:
    api.cancel_job(service, caller, _get(service, job_id).id)
    return see_other(addresses.job(job_id))


@router.post("/{job_id}/retry")
def retry(service: Service, caller: Tuner, job_id: str) -> Response:
    reply = api.retry_job(service, caller, _get(service, job_id).id)
    return see_other("/ui" + reply.headers["location"])


def _convergence(service: State, shown: Job) -> Markup:
    result_us = shown.best_us if shown.state is JobState.DONE else None
    return convergence(service.store.tried_for(shown.id), result_us)


def _served(service: State, shown: Job, device: str | None) -> Winner | None:
    # None if it is the job's own result.
    winner = service.store.winner(shown.problem, device or "") if shown.winner_revision else None
    return None if winner is None or winner.revision == shown.winner_revision else winner


def _get(service: State, job_id: str) -> Job:
    try:
        return service.queue.get(job_id)
    except JobNotFound:
        links = {"jobs": {"href": addresses.JOBS}}
        raise not_found("Job", f"There is no job {job_id!r:.80}.", links) from None
