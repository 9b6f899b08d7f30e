"""`GET /results`: the history of trials, failed ones included, page by page."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Query
from starlette.responses import Response

from service import documents
from service.access import Scope, needs
from service.schemas import Format, ResultsQuery
from service.state import Service
from tuner.store import StoredTrial

router = APIRouter(tags=["history"])

_COLUMNS = (
    "id", "created_at", "device", "m", "n", "k", "batch", "dtype", "layout", "phase", "kernel",
    "launch", "median_us", "ci_low_us", "ci_high_us", "samples", "failure", "error",
    "workspace_bytes", "replayed", "job",
)  # fmt: skip


@router.get("/results", dependencies=[needs(Scope.READ)])
def results(service: Service, query: Annotated[ResultsQuery, Query()]) -> Response:
    """Trials in the order they were recorded, as JSON or CSV; `after` continues a page."""
    problem = query.problem()
    stored = service.store.trials(
        problem=problem,
        device=query.device,
        dtype=query.dtype,
        layout=query.layout,
        phase=query.phase,
        job=query.job,
        after=query.after,
        limit=query.limit,
    )
    following = None
    if len(stored) == query.limit:
        given = query.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
        following = f"/results?{urlencode({**given, 'after': stored[-1].id})}"
    if query.format is Format.CSV:
        headers = {"Link": f'<{following}>; rel="next"'} if following else {}
        return Response(_table(stored), media_type="text/csv", headers=headers)
    return documents.json_response(
        documents.page("trials", map(documents.trial, stored), following)
    )


def _table(stored: Iterable[StoredTrial]) -> str:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(_COLUMNS)
    writer.writerows(map(_row, stored))
    return text.getvalue()


def _row(stored: StoredTrial) -> tuple[Any, ...]:
    trial = stored.trial
    problem, statistics, failure = trial.problem, trial.statistics, trial.failure
    return (
        stored.id,
        documents.timestamp(stored.created_at),
        trial.device.slug,
        problem.m,
        problem.n,
        problem.k,
        problem.batch,
        problem.dtype.value,
        problem.layout.value,
        trial.phase.value,
        trial.candidate.kernel.name,
        trial.candidate.launch.key,
        statistics.median_us if statistics else None,
        statistics.ci_low_us if statistics else None,
        statistics.ci_high_us if statistics else None,
        statistics.samples if statistics else None,
        failure.kind.value if failure else None,
        trial.correctness.error if trial.correctness else None,
        trial.workspace_bytes,
        trial.replayed,
        trial.job,
    )
