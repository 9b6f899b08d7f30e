"""A problem's page: what is served and why, the trials, and earlier revisions.

A problem without a winner has a page too: the answer of lookups meanwhile, and how to tune it.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import asdict
from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Request
from markupsafe import Markup
from starlette.responses import Response

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.problem import Problem
from service.charts import counters, rooflines
from service.charts.intervals import regimes
from service.documents import best_url
from service.errors import ProblemError, invalid_field, not_found
from service.explaining import explanation_of
from service.http.requests import PinBody, WinnerBody
from service.http.routes import winners as api
from service.http.state import Service, State
from service.lookup import find
from service.lookup.abilities import EVERYTHING
from service.pages import addresses
from service.pages.comparisons import changes, curl, elsewhere, python
from service.pages.fields import Admin, Posted, Reader
from service.pages.plots import plots
from service.pages.render import page, see_other
from service.report.problem_rows import row_of
from service.report.reasons import default_note
from service.report.regimes import mean
from service.report.roofs import Roof, nominal_roof
from tuner.errors import JobNotFound
from tuner.explain import Explanation
from tuner.store.revisions import WinnerRevision
from tuner.trial import Winner

router = APIRouter(include_in_schema=False)

_PATH = addresses.PROBLEMS + "/{device}/{dtype}/{layout}/{sizes}"

_REVISION = re.compile(r"[1-9][0-9]{0,8}", re.ASCII)

RANKED = 50
HISTORY = 20


async def _named(dtype: str, layout: str, sizes: str) -> Problem:
    return addresses.problem_of(dtype, layout, sizes)


Named = Annotated[Problem, Depends(_named)]
"""The problem that the address names."""


@router.get(_PATH)
def problem(
    service: Service, caller: Reader, request: Request, problem: Named, device: str
) -> Response:
    model = _model(service, device)
    device = model.slug
    winner = service.store.winner(problem, device)
    ranking = service.store.listing.ranking(problem, device, RANKED)
    explained = explanation_of(winner, service.store, service.artifacts) if winner else None
    rows = [row_of(winner, None)] if winner else []
    history = service.store.revisions(problem, device, limit=HISTORY)
    query = {**asdict(problem), "device": device, "format": "csv"}
    origin = str(request.base_url).rstrip("/")
    lookups = find.Charted(service.store, service.reader.chart)
    return page(
        "problem.html",
        nav=addresses.PROBLEMS,
        caller=caller,
        problem=problem,
        model=model,
        winner=winner,
        instead=None if winner else find.find(lookups, problem, model, accepted=find.ANY),
        explained=explained,
        default_note=default_note(problem) if winner else "",
        regimes=_regimes(winner) if winner else Markup(""),
        plots=plots(winner, ranking, history, service.store.tried_on(problem, device)),
        elsewhere=elsewhere(service.store, problem, service.catalogue.known()),
        roofline=rooflines.of_rows(rows, problem.dtype, _roofs(explained)),
        ranking=ranking,
        history=changes(history),
        python=python(problem, device, origin, with_key=service.access.required),
        curl=curl(problem, device, origin, with_key=service.access.required),
        jobs=_jobs(service, history),
        history_shown=HISTORY,
        answer=best_url(problem, device),
        counters=_counters(explained),
        explained_href=best_url(problem, device, "/explain"),
        results=f"/results?{urlencode(query)}",
        map=addresses.with_query(
            addresses.MAP,
            k=problem.k,
            batch=problem.batch,
            dtype=problem.dtype,
            layout=problem.layout.value,
            device=device,
        ),
        here=addresses.problem(problem, device),
    )


@router.post(_PATH + "/pin")
def pin(service: Service, caller: Admin, problem: Named, device: str, posted: Posted) -> Response:
    """Serve the revision that the form names, as `POST /winners/pin` does."""
    written = posted.get("revision", "")
    if not _REVISION.fullmatch(written):
        raise invalid_field("revision", f"is not a revision: {written!r:.40}", "1, 2, 3 …")
    body = PinBody(**asdict(problem), device=device, revision=int(written))
    api.pin(service, caller, EVERYTHING, body)
    return _to_history(problem, device)


@router.post(_PATH + "/unpin")
def unpin(service: Service, caller: Admin, problem: Named, device: str) -> Response:
    api.unpin(service, caller, EVERYTHING, WinnerBody(**asdict(problem), device=device))
    return _to_history(problem, device)


@router.post(_PATH + "/rollback")
def roll_back(service: Service, caller: Admin, problem: Named, device: str) -> Response:
    api.roll_back(service, caller, EVERYTHING, WinnerBody(**asdict(problem), device=device))
    return _to_history(problem, device)


def _to_history(problem: Problem, device: str) -> Response:
    return see_other(f"{addresses.problem(problem, device)}#history")


def _model(service: State, device: str) -> DeviceModel:
    try:
        return service.catalogue.named(device)
    except ProblemError:
        raise not_found(
            "Device",
            f"There is no device model {device!r:.80} here.",
            {"devices": {"href": addresses.DEVICES}},
        ) from None


def _jobs(service: State, history: list[WinnerRevision]) -> set[str]:
    """Return the ids of the history's jobs that have a page."""
    jobs = set()
    for job in {revision.winner.job for revision in history if revision.winner.job}:
        with suppress(JobNotFound):  # it ran in another installation, or without the queue
            jobs.add(service.queue.get(job).id)
    return jobs


def _regimes(winner: Winner) -> Markup:
    default = winner.problem.operation.default
    return regimes(winner.regimes, winner.power_penalty, mean(winner.regimes), default)


def _counters(explained: Explanation | None) -> list[tuple[str, Markup]]:
    """Return the titles and charts of the recorded profile, if there is one."""
    if explained is None or explained.profile is None:
        return []
    drawn = (
        ("What a warp waits for", counters.waits(explained.profile)),
        ("How busy the units are", counters.units(explained.profile)),
    )
    return [(title, chart) for title, chart in drawn if chart]


def _roofs(explained: Explanation | None) -> list[Roof]:
    """Return the nominal roof and the measured one of the regime, as far as they are known."""
    limits = explained.work.roofline if explained else None
    if explained is None or limits is None:
        return []
    peak, bandwidth = limits.peak, limits.bandwidth
    nominal = nominal_roof(explained.device, explained.problem.dtype)
    measured = None
    if peak.is_measured and bandwidth.is_measured:
        measured = Roof(bandwidth=bandwidth.rate, peak=peak.rate, measured=True)
    return [roof for roof in (nominal, measured) if roof]
