"""A short cut for lookups: what is certain is answered before FastAPI sees the request.

Three quarters of the time of a lookup in memory would go into finding its route and checking its
parameters. A query string that was answered before needs neither; others, and batches, are decoded
straight into problems. Whatever is not plain, a key that is not known, a wrong field, a device
that has to be looked for, is passed on untouched and is answered, or refused and explained, by the
routes. So both roads give the same answers; `tests/unit/service/test_fast_path.py` holds that to
the byte.

Inside the other middlewares: limits, ids, metrics and refusals are theirs here too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated

import msgspec
import structlog
from starlette.types import ASGIApp, Message, Receive, Send
from starlette.types import Scope as Connection

from gemmsmith.errors import InvalidProblem
from gemmsmith.operation import of_dtype
from gemmsmith.problem import Problem
from service.http.abilities import Abilities, abilities_of
from service.http.access import LOCAL, Caller, Scope
from service.http.asked import Asked
from service.http.errors import ProblemError, invalid_field
from service.http.middleware import UNLOGGED, put_back
from service.http.requests import MAX_BATCH_PROBLEMS, Arch
from service.http.state import State
from service.http.turns import whose
from service.lookup import reader
from service.lookup.cache import RawHeaders, Rendered
from service.metrics.prometheus import AnswerSource
from tuner.errors import StoreError


class _Batch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`service.http.requests.BestBatchBody` where everything in it is as it should be."""

    problems: Annotated[list[Asked], msgspec.Meta(min_length=1, max_length=MAX_BATCH_PROBLEMS)]
    arch: Arch | None = None
    device: Annotated[str, msgspec.Meta(max_length=200)] | None = None
    exact: bool = False


_BATCH = msgspec.json.Decoder(_Batch)

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
_BEST_BATCH = _Route("/best:batch")


class FastPath:
    """Answers lookups, or passes them on."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Connection, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "http":
            if scope["path"] == "/best" and scope["method"] == "GET":
                if await _best(scope, receive, send):
                    return
            elif scope["path"] == "/best:batch" and scope["method"] == "POST":
                message = await receive()  # the whole body: `LimitBody` has read it
                if await _batch(scope, receive, message, send):
                    return
                receive = put_back(message, receive)
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
        try:
            found = await service.lookups.singles.run(
                whose(caller, scope), _looked_up, service, query
            )
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


async def _batch(scope: Connection, receive: Receive, message: Message, send: Send) -> bool:
    """Answer a batch that has nothing wrong in it; whether it was one."""
    service: State = scope["app"].state.service
    caller = _admitted(service, scope) if _is_json(scope) else None
    if caller is None:
        return False
    client = whose(caller, scope)
    content = message.get("body", b"")
    with ExitStack() as asking:
        try:
            asking.enter_context(service.lookups.admitted(client, _problems_in(content)))
        except ProblemError as refusal:
            scope["route"] = _BEST_BATCH
            await refusal.response(_BEST_BATCH.path)(scope, receive, send)
            return True
        try:
            abilities = abilities_of(scope["headers"])
            body = await service.lookups.batches.run(client, _answered, service, content, abilities)
        except (
            msgspec.DecodeError,
            UnicodeDecodeError,
            InvalidProblem,
            ProblemError,
            StoreError,
        ):
            return False
        scope["route"] = _BEST_BATCH
        length = b"%d" % len(body)
        headers = [(b"content-length", length), (b"content-type", b"application/json")]
        await _answer(send, 200, headers, b"", before=body)
    return True


def _problems_in(body: bytes) -> int:
    """How many problems a batch asks about, without reading it: each is an object in an object."""
    return max(1, body.count(b"{") - 1)


def _answered(service: State, body: bytes, abilities: Abilities) -> reader.Body:
    asked = _BATCH.decode(body)
    generation = service.answers.generation
    device = service.catalogue.resolve(asked.arch, asked.device)
    return reader.batch(
        service,
        [_problem(item) for item in asked.problems],
        device,
        exact=asked.exact,
        generation=generation,
        abilities=abilities,
    )


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


def _is_json(scope: Connection) -> bool:
    types = [value for name, value in scope["headers"] if name == b"content-type"]
    return types == [b"application/json"]


def _if_none_match(scope: Connection) -> str | None:
    for name, value in scope["headers"]:
        if name == b"if-none-match":
            tags: str = value.decode("latin-1")
            return tags
    return None


async def _answer(
    send: Send, status: int, headers: RawHeaders, body: bytes, *, before: Iterable[bytes] = ()
) -> None:
    """Send an answer; of a long body, all but the last piece is what comes `before` that."""
    await send({"type": "http.response.start", "status": status, "headers": headers})
    for piece in before:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": body})
