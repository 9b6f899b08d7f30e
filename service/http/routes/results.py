"""`GET /results`: the history of trials, failed ones included, page by page."""

from __future__ import annotations

import functools
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from gemmsmith.core.device import called
from service import documents, tables
from service.http.access import Scope, needs
from service.http.requests import ResultsQuery
from service.http.routes.exports import Accept, listing
from service.http.routes.paging import filled
from service.http.state import Service
from service.lookup.abilities import Asking

router = APIRouter(tags=["history"])


@router.get("/results", dependencies=[needs(Scope.READ)])
def results(
    service: Service,
    asking: Asking,
    query: Annotated[ResultsQuery, Query()],
    accept: Accept = "*/*",
) -> Response:
    """Trials in the order they were recorded, as JSON, CSV or Parquet; `after` is a trial's id."""
    slugs = called(query.device or "", [model.slug for model in service.catalogue.known()])
    device = slugs[0] if len(slugs) == 1 else query.device
    read = functools.partial(
        service.store.trials,
        problem=query.problem(),
        device=device,
        dtype=query.dtype,
        layout=query.layout,
        phase=query.phase,
        job=query.job,
        limit=query.limit,
    )
    trials = filled(
        lambda after: read(after=after),
        lambda stored: asking.reads(stored.trial.problem, stored.trial.candidate.kernel),
        cursor=lambda last: last.id,
        after=query.after,
        limit=query.limit,
    )
    return listing(
        "/results",
        "trials",
        query,
        accept,
        tables.TRIALS,
        trials,
        document=documents.trial,
        cursor=lambda last: last.id,
    )
