"""A short cut for lookups: what is certain is answered before FastAPI sees the request.

Three quarters of the time of a lookup in memory would go into finding its route and checking its
parameters. A query string that was answered before needs neither; others are decoded straight into
problems. Whatever is not plain, a key that is not known, a wrong field, a device
that has to be looked for, is passed on untouched and is answered, or refused and explained, by the
routes. So both roads give the same answers; `tests/unit/service/test_fast_path.py` holds that to
the byte.

Inside the other middlewares: limits, ids, metrics and refusals are theirs here too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec
import structlog
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as Connection

from gemmsmith.core.operation import of_dtype
from gemmsmith.core.problem import Problem
from gemmsmith.errors import InvalidProblem
from service.http.abilities import abilities_of
from service.http.access import LOCAL, Caller, Scope
from service.http.asked import Asked
from service.http.errors import ProblemError, invalid_field
from service.http.middleware import UNLOGGED
from service.http.requests import Arch
from service.http.state import State
from service.http.turns import whose
from service.lookup import reader
from service.lookup.cache import RawHeaders, Rendered
from service.metrics.prometheus import AnswerSource
from tuner.errors import StoreError

_PARAMETER = (
    "(?:(?:m|n|k|batch|groups)=[1-9][0-9]{0,9}|(?:exact|accumulate)=(?:true|false)"
    "|(?:dtype|layout|out|scaling|grouping|epilogue|arch|device)=[a-z0-9_.-]{1,200})"
)
_PLAIN = re.compile(f"{_PARAMETER}(?:&{_PARAMETER})*".encode())
"""A query of `service.http.requests.BestQuery` with nothing to unquote, convert or leave out."""


@dataclass(frozen=True, slots=True)
class _Route:
    """What `service.http.middleware` takes a route's name from."""

    path: str


_BEST = _Route("/best")


class FastPath:
    """Answers lookups, or passes them on."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Connection, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        is_lookup = (
            scope["type"] == "http" and scope["path"] == "/best" and scope["method"] == "GET"
        )
        if not (is_lookup and await _best(scope, receive, send)):
            await self.app(scope, receive, send)


async def _best(scope: Connection, receive: Receive, send: Send) -> bool:
    """Answer a query that has nothing wrong in it, at once if from memory; whether it was one."""
    service: State = scope["app"].state.service
    query: bytes = scope["query_string"]
    found: reader.Found | None = service.answers.asked(query)
    if found is None and not _PLAIN.fullmatch(query):
        return False
    caller = _admitted(service, scope)
    if caller is None:
        return False
    scope["route"] = _BEST  # also of a fault, where it is counted
    if isinstance(found, Rendered):
        service.metrics.lookup(found.match, AnswerSource.MEMORY)
        scope[UNLOGGED] = True
    else:
        client = whose(caller, scope)
        try:
            with service.in_progress.admitted(client):
                found = await service.lookups.singles.run(client, _looked_up, service, query)
        except (msgspec.ValidationError, InvalidProblem, ProblemError, StoreError):
            return False
    found = reader.told(found, abilities_of(scope["headers"]))
    if isinstance(found, Rendered):
        await _answer(send, *found.reply(_if_none_match(scope)))
    else:
        await found.response(_BEST.path)(scope, receive, send)
    return True


def _looked_up(service: State, query: bytes) -> reader.Found:
    """As `service.http.routes.best` does it, for a query that is `_PLAIN`."""
    given = dict(pair.split("=") for pair in query.decode().split("&"))
    exact = given.pop("exact", "false") == "true"
    arch = msgspec.convert(given.pop("arch", None), Arch | None)
    slug = given.pop("device", None)
    asked = msgspec.convert(given, Asked, strict=False)
    generation = service.answers.generation
    device = service.catalogue.resolve(arch, slug)
    problem = _problem(asked)
    if isinstance(problem, ProblemError):
        return problem
    return reader.answer_query(service, query, problem, device, exact=exact, generation=generation)


def _problem(asked: Asked) -> Problem | ProblemError:
    """The problem meant, or what is wrong with it.

    Raises:
        InvalidProblem: its `dtype` is none, of which the routes say more.
    """
    try:
        return asked.problem()
    except InvalidProblem as error:
        of_dtype(asked.dtype)
        return invalid_field(error.field, str(error))


def _admitted(service: State, scope: Connection) -> Caller | None:
    try:
        caller = service.access.admit(scope, Scope.READ)
    except ProblemError:
        return None
    if caller is not LOCAL:
        structlog.contextvars.bind_contextvars(key=caller.name)
    return caller


def _if_none_match(scope: Connection) -> str | None:
    for name, value in scope["headers"]:
        if name == b"if-none-match":
            tags: str = value.decode("latin-1")
            return tags
    return None


async def _answer(send: Send, status: int, headers: RawHeaders, body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
