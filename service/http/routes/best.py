"""`GET /best` and `POST /best:batch`: look up the fastest known way to compute a problem."""

from __future__ import annotations

from collections.abc import AsyncIterator

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from service.errors import ProblemError
from service.http import batches
from service.http.access import Caller, whose
from service.http.bodies import BATCH, json_body
from service.http.lookup_routes import LookupRoute
from service.http.middleware import UNLOGGED
from service.http.questions import QuestionReader
from service.http.requests import BestBatchBody, BestQuery
from service.http.state import State
from service.lookup import reader
from service.lookup.abilities import Abilities, abilities_of
from service.lookup.cache import RawHeaders, Rendered
from service.metrics.prometheus import AnswerSource

_QUERY = QuestionReader(BestQuery)


async def best(request: Request, caller: Caller) -> Response:
    """The fastest known kernel and launch for a matrix product on a GPU model.

    If neither this problem nor a nearby one was tuned, the cost model's proposal is returned
    (`predicted`).
    """
    service: State = request.app.state.service
    query: bytes = request.scope["query_string"]
    answer: reader.Found | None = service.answers.asked(query)
    if isinstance(answer, Rendered):
        service.metrics.lookup(answer.match, AnswerSource.MEMORY)
        request.scope[UNLOGGED] = True
    else:
        client = whose(caller, request.scope)
        with service.in_progress.admitted(client):
            answer = await service.lookups.singles.run(client, _look_up, service, query)
    answer = reader.for_client(answer, abilities_of(request.scope["headers"]))
    if isinstance(answer, ProblemError):
        raise answer
    return _Ready(*answer.reply(_if_none_match(request)))


class _Ready(Response):
    """A response whose headers are there: nothing is left to work out."""

    def __init__(self, status: int, headers: RawHeaders, body: bytes) -> None:
        self.status_code = status
        self.raw_headers = headers
        self.body = body
        self.background = None


def _if_none_match(request: Request) -> str | None:
    for name, value in request.scope["headers"]:  # quicker than `request.headers`
        if name == b"if-none-match":
            return str(value, "latin-1")
    return None


def _look_up(service: State, query: bytes) -> reader.Found:
    asked = _QUERY.query(query)
    generation = service.answers.generation  # first: it vouches for the device, too
    device = service.catalogue.resolve(asked.arch, asked.device)
    return service.reader.query(
        query, asked.problem(), device, exact=asked.exact, generation=generation
    )


async def best_batch(request: Request, _: Caller) -> Response:
    """Many lookups in one call, each answered as by `GET /best`; an invalid one fails alone.

    While a client's batches together reach the limit of problems, further ones get a 429: send them
    again after `Retry-After` seconds.
    """
    content = await json_body(request)
    abilities = abilities_of(request.scope["headers"])
    body = await to_thread.run_sync(_answer_batch, request.app.state.service, abilities, content)
    return StreamingResponse(
        _sent(body),
        media_type="application/json",
        headers={"Content-Length": str(len(body))},
    )


async def _sent(body: reader.Body) -> AsyncIterator[bytes]:
    for piece in body:
        yield piece


def _answer_batch(service: State, abilities: Abilities, content: bytes) -> reader.Body:
    batch = batches.read(content)
    generation = service.answers.generation
    device = service.catalogue.resolve(batch.options.arch, batch.options.device)
    return service.reader.batch(
        batch.problems,
        device,
        exact=batch.options.exact,
        generation=generation,
        abilities=abilities,
    )


routes = [
    LookupRoute("GET", "/best", best, BestQuery),
    LookupRoute("POST", BATCH, best_batch, BestBatchBody),
]
