"""`GET /best` and `POST /best:batch`: look up the fastest known way to compute a problem."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Annotated

from anyio import to_thread
from fastapi import APIRouter, Header, Query, Request
from starlette.responses import Response, StreamingResponse

from service.http import batches
from service.http.abilities import Abilities, Asking
from service.http.access import Caller, Scope, needs
from service.http.errors import ProblemError
from service.http.requests import BestQuery
from service.http.response_schemas import ref
from service.http.state import Service, State
from service.http.turns import whose
from service.http.wellformed import BATCH
from service.lookup import reader
from service.lookup.cache import Rendered

router = APIRouter(tags=["lookup"])

_BATCH_BODY = {
    "required": True,
    "content": {"application/json": {"schema": ref("BestBatchBody")}},
}
"""For the OpenAPI description; `service.http.batches` reads it."""

_JSON = re.compile(r"\s*application/(\S+\+)?json\s*(;|$)", re.IGNORECASE)


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


@router.post(BATCH, dependencies=[needs(Scope.READ)], openapi_extra={"requestBody": _BATCH_BODY})
async def best_batch(request: Request, service: Service, asking: Asking) -> Response:
    """Many lookups in one call, each answered as by `GET /best`; an invalid one fails alone.

    While a client's batches together reach the limit of problems, further ones get a 429: send them
    again after `Retry-After` seconds.
    """
    content = b""
    if _JSON.match(request.headers.get("content-type", "")):
        content = await request.body()
    body = await to_thread.run_sync(_answered, service, asking, content)
    return StreamingResponse(
        _sent(body),
        media_type="application/json",
        headers={"Content-Length": str(len(body))},
    )


async def _sent(body: reader.Body) -> AsyncIterator[bytes]:
    for piece in body:
        yield piece


def _looked_up(service: State, asked: bytes, query: BestQuery) -> reader.Found:
    generation = service.answers.generation  # first: it vouches for the device, too
    device = service.catalogue.resolve(query.arch, query.device)
    return reader.answer_query(
        service, asked, query.problem(), device, exact=query.exact, generation=generation
    )


def _answered(service: State, asking: Abilities, content: bytes) -> reader.Body:
    batch = batches.read(content)
    generation = service.answers.generation
    device = service.catalogue.resolve(batch.options.arch, batch.options.device)
    return reader.batch(
        service,
        batch.problems,
        device,
        exact=batch.options.exact,
        generation=generation,
        abilities=asking,
    )


def _response(answer: Rendered, if_none_match: str | None) -> Response:
    status, headers, content = answer.reply(if_none_match)
    response = Response(content, status_code=status)
    response.raw_headers = headers
    return response
