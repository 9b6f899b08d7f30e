"""`GET /best` and `POST /best:batch`: look up the fastest known way to compute a problem."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Header, Query, Request
from pydantic import ValidationError
from starlette.responses import Response

from gemmsmith.errors import InvalidProblem
from service.http.abilities import Asking
from service.http.access import Scope, needs
from service.http.errors import ProblemError, from_validation, invalid_field
from service.http.requests import BestBatchBody, BestQuery, ProblemBody
from service.http.state import Service
from service.lookup import reader
from service.lookup.cache import Question, Rendered

router = APIRouter(tags=["lookup"])


@router.get("/best", dependencies=[needs(Scope.READ)])
def best(
    request: Request,
    service: Service,
    asking: Asking,
    query: Annotated[BestQuery, Query()],
    if_none_match: Annotated[str | None, Header()] = None,
) -> Response:
    """The fastest known kernel and launch for a matrix product on a GPU model.

    What was never tuned, nor anything like it, gets the cost model's proposal, `predicted`.
    """
    generation = service.answers.generation  # first: it vouches for the device, too
    device = service.catalogue.resolve(query.arch, query.device)
    question = Question.of(query.problem())
    asked: bytes = request.scope["query_string"]
    answer = reader.answer_query(
        service, asked, question, device, exact=query.exact, generation=generation
    )
    answer = reader.told(answer, asking)
    if isinstance(answer, ProblemError):
        raise answer
    return _response(answer, if_none_match)


@router.post("/best:batch", dependencies=[needs(Scope.READ)])
def best_batch(service: Service, asking: Asking, body: BestBatchBody) -> Response:
    """Many lookups in one call, each answered as by `GET /best`; a wrong one costs itself only."""
    generation = service.answers.generation
    device = service.catalogue.resolve(body.arch, body.device)
    asked = [_question(item) for item in body.problems]
    content = reader.batch(
        service, asked, device, exact=body.exact, generation=generation, abilities=asking
    )
    return Response(b"".join(content), media_type="application/json")


def _response(answer: Rendered, if_none_match: str | None) -> Response:
    status, headers, content = answer.reply(if_none_match)
    response = Response(content, status_code=status)
    response.raw_headers = headers
    return response


def _question(item: Any) -> Question | ProblemError:
    """One problem of a batch, or what is wrong with it."""
    try:
        return msgspec.convert(item, Question)
    except msgspec.ValidationError:
        pass
    try:
        return Question.of(ProblemBody.model_validate(item).problem())
    except ValidationError as error:
        return from_validation(error.errors())
    except InvalidProblem as error:
        return invalid_field(error.field, str(error))
