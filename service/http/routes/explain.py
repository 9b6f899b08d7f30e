"""`GET /explain`: why the winner of a problem is the fastest."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter
from starlette.responses import Response

from service import documents
from service.explaining import explanation_of
from service.http.access import Scope, needs
from service.http.questions import query_of
from service.http.requests import ExplainQuery
from service.http.state import Service
from service.lookup.abilities import Asking

router = APIRouter(tags=["history"])


@router.get("/explain", dependencies=[needs(Scope.READ)])
def explain(
    service: Service, asking: Asking, query: Annotated[ExplainQuery, query_of(ExplainQuery)]
) -> Response:
    """Work, tiles, waves, occupancy, energy and time of a winner and of the default.

    With the reason why the winner wins, or why the default stays. Figures follow from what was
    recorded; `parts` and `l2_bytes` are estimates. What is not on record is null.
    """
    problem = query.problem()
    device = service.catalogue.resolve(query.arch, query.device)
    winner = None
    if device is not None and asking.knows(problem):
        winner = service.store.winner(problem, device.slug)
    if winner is None:
        raise documents.not_tuned(problem, device, exact=True)
    item = explanation_of(asking.report(winner), service.store, service.artifacts)
    return documents.json_response(documents.explanation(item))
