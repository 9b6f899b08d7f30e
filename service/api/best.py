"""`GET /best` and `POST /best:batch`: look up the fastest known way to compute a problem."""

from __future__ import annotations

import functools
import hashlib
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query
from pydantic import ValidationError
from starlette.responses import Response

from gemmsmith.answer import Answer, Match
from gemmsmith.device import DeviceModel
from gemmsmith.errors import InvalidProblem
from gemmsmith.problem import Problem
from service import documents, lookup
from service.access import Scope, needs
from service.catalogue import check_fits
from service.problems import ProblemError, from_validation, invalid_field
from service.schemas import BestBatchBody, BestQuery, ProblemBody
from service.state import Service, State

router = APIRouter(tags=["lookup"])

_SNAPSHOT_FROM = 32
"""Lookups in one call from which reading all winners of the device at once is the cheaper way."""


@router.get("/best", dependencies=[needs(Scope.READ)])
def best(
    service: Service,
    query: Annotated[BestQuery, Query()],
    if_none_match: Annotated[str | None, Header()] = None,
) -> Response:
    """The fastest known kernel and launch for a matrix product on a GPU model.

    What was never tuned, nor anything like it, gets the cost model's proposal, `predicted`.
    """
    problem = query.problem()
    device = service.catalogue.resolve(query.arch, query.device)
    answer = _look_up(
        service, service.store, service.store.pack_for, problem, device, exact=query.exact
    )
    tag = _etag(answer)
    headers = {"ETag": tag, "Cache-Control": "no-cache"}
    if if_none_match is not None and _matches(if_none_match, tag):
        return Response(status_code=304, headers=headers)
    return documents.json_response(documents.answer(answer), headers=headers)


@router.post("/best:batch", dependencies=[needs(Scope.READ)])
def best_batch(service: Service, body: BestBatchBody) -> Response:
    """Many lookups that agree with each other; a wrong problem costs its own answer only."""
    device = service.catalogue.resolve(body.arch, body.device)
    source: lookup.WinnerSource = service.store
    pack_of = functools.cache(service.store.pack_for)
    if device is not None and len(body.problems) >= _SNAPSHOT_FROM:
        source = lookup.Snapshot(service.store.winners(device=device.slug))
    answers = []
    for index, item in enumerate(body.problems):
        try:
            answer = _look_up(service, source, pack_of, _problem(item), device, exact=body.exact)
        except ProblemError as error:
            answers.append(error.document(f"/best:batch#/problems/{index}"))
        else:
            answers.append(documents.answer(answer))
    return documents.json_response({"answers": answers})


def _look_up(
    service: State,
    source: lookup.WinnerSource,
    pack_of: lookup.PackOf,
    problem: Problem,
    device: DeviceModel | None,
    *,
    exact: bool,
) -> Answer:
    check_fits(problem, device)
    answer = None
    if device is not None:
        answer = lookup.find(
            source, problem, device, exact=exact, pack_of=pack_of, ranker=service.ranker
        )
    service.metrics.lookups.labels(answer.match if answer else "unknown").inc()
    if answer is None:
        raise documents.not_tuned(problem, device, exact=exact)
    return answer


def _problem(item: Any) -> Problem:
    """One problem of a batch.

    Raises:
        ProblemError: it is not one.
    """
    try:
        return ProblemBody.model_validate(item).problem()
    except ValidationError as error:
        raise from_validation(error.errors()) from error
    except InvalidProblem as error:
        raise invalid_field(error.field, str(error)) from error


def _etag(answer: Answer) -> str:
    """Weak: the same winner, though a later answer may name a pack compiled since."""
    pack = answer.config.pack if answer.config else None
    identity: tuple[object, ...] = (
        answer.device.slug,
        answer.measured,
        answer.revision,
        answer.stale,
        answer.pinned,
        answer.match,
        pack,
    )
    if answer.match is Match.PREDICTED:  # has no revision: another cost model may answer otherwise
        identity += (answer.config, answer.predicted_us)
    return f'W/"{hashlib.blake2s(repr(identity).encode(), digest_size=8).hexdigest()}"'


def _matches(header: str, tag: str) -> bool:
    given = {part.strip().removeprefix("W/") for part in header.split(",")}
    return "*" in given or tag.removeprefix("W/") in given
