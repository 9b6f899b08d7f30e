"""A problem's page: what is served and why, what was tried, and what was served before.

A problem that has no winner has a page too: what is answered meanwhile, and how to tune it.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import asdict
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Path, Request
from markupsafe import Markup
from starlette.responses import Response

from gemmsmith.answers.answer import Answer
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.problem import Problem
from service.charts import rooflines
from service.charts.intervals import regimes
from service.http.abilities import EVERYTHING
from service.http.documents import best_url
from service.http.errors import ProblemError, invalid_field, not_found
from service.http.requests import PinBody, WinnerBody
from service.http.routes import winners as api
from service.http.state import Service, State
from service.lookup import find
from service.lookup.neighbourhood import Charted
from service.pages import addresses
from service.pages.callers import Admin, Reader
from service.pages.ceilings import ceilings_of
from service.pages.comparisons import changes, curl, elsewhere, python
from service.pages.fields import Posted
from service.pages.plots import plots
from service.pages.render import page, see_other
from service.report.problem_rows import ReportRow, row_of
from service.report.reasons import baseline_note, why
from service.report.regimes import mean
from service.report.roofs import Roof, measured_roof, nominal_roof
from tuner.errors import JobNotFound
from tuner.measure.ceilings import Ceilings
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

Device = Annotated[str, Path(max_length=200)]


@router.get(_PATH)
def problem(
    service: Service, caller: Reader, request: Request, asked: Named, device: Device
) -> Response:
    """The page."""
    model = _model(service, device)
    device = model.slug
    winner = service.store.winner(asked, device)
    ranking = service.store.listing.ranking(asked, device, RANKED)
    ceilings = ceilings_of(device)
    row = row_of(winner, ceilings) if winner else None
    measured, nominal = measured_roof(ceilings, asked.dtype), nominal_roof(model, asked.dtype)
    roofs = [roof for roof in (nominal, measured) if roof]
    history = service.store.revisions(asked, device, limit=HISTORY)
    sizes = {"m": asked.m, "n": asked.n, "k": asked.k, "batch": asked.batch}
    kind = {"dtype": asked.dtype, "layout": asked.layout.value, "device": device}
    origin = str(request.base_url).rstrip("/")
    return page(
        "problem.html",
        nav=addresses.PROBLEMS,
        caller=caller,
        problem=asked,
        model=model,
        winner=winner,
        instead=None if winner else _instead(service, asked, model),
        why="; ".join(filter(None, (why(row), baseline_note(asked)))) if row else "",
        regimes=_regimes(winner) if winner else Markup(""),
        plots=plots(winner, ranking, history, service.store.tried.of_problem(asked, device)),
        elsewhere=elsewhere(service.store, asked, service.catalogue.known()),
        roofline=rooflines.of_rows([row] if row else [], asked.dtype, roofs),
        row=row,
        limits=_limits(row, roofs, ceilings) if row else (),
        ceilings=ceilings,
        ranking=ranking,
        history=changes(history),
        python=python(asked, device, origin, with_key=service.access.required),
        curl=curl(asked, device, origin, with_key=service.access.required),
        jobs=_jobs(service, history),
        history_shown=HISTORY,
        answer=best_url(asked, device),
        results=f"/results?{urlencode({**sizes, **kind, 'format': 'csv'})}",
        map=addresses.with_query(addresses.MAP, k=asked.k, batch=asked.batch, **kind),
        here=addresses.problem(asked, device),
    )


@router.post(_PATH + "/pin")
def pin(service: Service, caller: Admin, asked: Named, device: Device, posted: Posted) -> Response:
    """Serve the revision that the form names, as `POST /winners/pin` does."""
    written = posted.get("revision", "")
    if not _REVISION.fullmatch(written):
        raise invalid_field("revision", f"is not a revision: {written!r:.40}", "1, 2, 3 …")
    body = PinBody(**_body(asked, device), revision=int(written))
    api.pin(service, caller, EVERYTHING, body)
    return _to_history(asked, device)


@router.post(_PATH + "/unpin")
def unpin(service: Service, caller: Admin, asked: Named, device: Device) -> Response:
    """Serve the newest revision of the best origin again, as `POST /winners/unpin` does."""
    api.unpin(service, caller, EVERYTHING, WinnerBody(**_body(asked, device)))
    return _to_history(asked, device)


@router.post(_PATH + "/rollback")
def roll_back(service: Service, caller: Admin, asked: Named, device: Device) -> Response:
    """Serve what was served before, as `POST /winners/rollback` does."""
    api.roll_back(service, caller, EVERYTHING, WinnerBody(**_body(asked, device)))
    return _to_history(asked, device)


def _body(asked: Problem, device: str) -> dict[str, Any]:
    return {**asdict(asked), "device": device}


def _to_history(asked: Problem, device: str) -> Response:
    return see_other(f"{addresses.problem(asked, device)}#history")


def _model(service: State, device: str) -> DeviceModel:
    try:
        return service.catalogue.named(device)
    except ProblemError:
        raise not_found(
            "Device",
            f"There is no device model {device!r:.80} here.",
            {"devices": {"href": addresses.DEVICES}},
        ) from None


def _instead(service: State, asked: Problem, model: DeviceModel) -> Answer | None:
    """What a lookup answers while there is no winner."""
    return find.find(
        Charted(service.store, service.chart),
        asked,
        model,
        accepted=find.ANY,
        ranker=service.ranker,
    )


def _jobs(service: State, history: list[WinnerRevision]) -> set[str]:
    """Those of the history's jobs that have a page: others ran elsewhere, or without the queue."""
    found = set()
    for job in {revision.winner.job for revision in history if revision.winner.job}:
        with suppress(JobNotFound):
            found.add(service.queue.get(job).id)
    return found


def _regimes(winner: Winner) -> Markup:
    default = winner.problem.operation.default
    return regimes(winner.regimes, winner.power_penalty, mean(winner.regimes), default)


def _limits(
    row: ReportRow, roofs: list[Roof], ceilings: Ceilings | None
) -> list[tuple[str, str, float]]:
    """What bounds the problem: its name, its figure, and the time in microseconds it allows."""
    found = []
    moved = row.problem.operand_bytes
    copy = ceilings.bandwidth_at(moved) if ceilings else None
    if copy:
        rate = f"{copy / 1e12:.2f} TB/s"
        found.append(("memory, a copy of as many bytes", rate, moved / copy * 1e6))
    for roof in reversed(roofs):
        source = "measured" if roof.measured else "nominal"
        found += [
            (
                f"memory, {source}",
                f"{roof.bandwidth / 1e12:.2f} TB/s",
                moved / roof.bandwidth * 1e6,
            ),
            (
                f"tensor cores, {source}",
                f"{roof.peak / 1e12:.0f} TFLOP/s",
                row.problem.flops / roof.peak * 1e6,
            ),
        ]
    return found
