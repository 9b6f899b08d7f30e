"""`GET /best` and `POST /best:batch`: look up the fastest known way to compute a problem."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Header, Query, Request
from pydantic import ValidationError
from starlette.responses import Response

from gemmsmith.errors import InvalidProblem
from gemmsmith.problem import Problem
from service.http.abilities import Abilities, Asking
from service.http.access import Caller, Scope, needs
from service.http.asked import Asked
from service.http.errors import ProblemError, from_validation, invalid_field
from service.http.requests import BestBatchBody, BestQuery, ProblemBody
from service.http.state import Service, State
from service.http.turns import whose
from service.lookup import reader
from service.lookup.cache import Rendered

router = APIRouter(tags=["lookup"])


@router.get("/best")
async def best(
    request: Request,
    service: Service,
    caller: Annotated[Caller, needs(Scope.READ)],
    asking: Asking,
    query: Annotated[BestQuery, Query()],
    if_none_match: Annotated[str | None, Header()] = None,
) -> Response:
    """The fastest known kernel and launch for a matrix product on a GPU model.

    If neither this problem nor a nearby one was tuned, the cost model's proposal is returned
    (`predicted`).
    """
    client = whose(caller, request.scope)
    asked: bytes = request.scope["query_string"]
    answer = await service.lookups.singles.run(client, _looked_up, service, asked, query)
    answer = reader.told(answer, asking)
    if isinstance(answer, ProblemError):
        raise answer
    return _response(answer, if_none_match)


@router.post("/best:batch")
async def best_batch(
    request: Request,
    service: Service,
    caller: Annotated[Caller, needs(Scope.READ)],
    asking: Asking,
    body: BestBatchBody,
) -> Response:
    """Many lookups in one call, each answered as by `GET /best`; an invalid one fails alone.

    While a client's batches together reach the limit of problems, further ones get a 429: send them
    again after `Retry-After` seconds.
    """
    client = whose(caller, request.scope)
    with service.lookups.admitted(client, len(body.problems)):
        return await service.lookups.batches.run(client, _answered, service, asking, body)


def _looked_up(service: State, asked: bytes, query: BestQuery) -> reader.Found:
    generation = service.answers.generation  # first: it vouches for the device, too
    device = service.catalogue.resolve(query.arch, query.device)
    return reader.answer_query(
        service, asked, query.problem(), device, exact=query.exact, generation=generation
    )


def _answered(service: State, asking: Abilities, body: BestBatchBody) -> Response:
    generation = service.answers.generation
    device = service.catalogue.resolve(body.arch, body.device)
    asked = [_problem(item) for item in body.problems]
    content = reader.batch(
        service, asked, device, exact=body.exact, generation=generation, abilities=asking
    )
    return Response(b"".join(content), media_type="application/json")


def _response(answer: Rendered, if_none_match: str | None) -> Response:
    status, headers, content = answer.reply(if_none_match)
    response = Response(content, status_code=status)
    response.raw_headers = headers
    return response


def _problem(item: Any) -> Problem | ProblemError:
    """One problem of a batch, or what is wrong with it."""
    try:
        return msgspec.convert(item, Asked).problem()
    except (msgspec.ValidationError, InvalidProblem):
        pass  # to be told by what follows, which says more
    try:
        return ProblemBody.model_validate(item).problem()
    except ValidationError as error:
        return from_validation(error.errors())
    except InvalidProblem as error:
        return invalid_field(error.field, str(error))
