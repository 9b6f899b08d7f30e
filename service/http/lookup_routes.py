"""Routes of lookups: Starlette's on the FastAPI application, served before FastAPI's own.

Most requests are lookups, and FastAPI's layers take longer than an answer from memory.
`service.http.questions` reads the questions, and `service.http.openapi` describes these routes
beside FastAPI's.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from service import errors
from service.http.access import Caller, admitted
from service.http.access import Scope as Right

Answer = Callable[[Request, Caller], Awaitable[Response]]


class LookupRoute(Route):
    """A route for callers who may read.

    Attributes:
        needs: the scope that a key must have.
        question: what a GET takes as its query, and a POST as its body.
    """

    needs = Right.READ

    def __init__(
        self, method: str, path: str, answer: Answer, question: type[msgspec.Struct]
    ) -> None:
        super().__init__(path, self.respond, methods=[method], name=answer.__name__)
        self.method = method
        self.description = inspect.getdoc(answer)
        self.question = question
        self._answer = answer

    async def respond(self, request: Request) -> Response:
        """The answer, or the refusal as a problem document."""
        try:
            return await self._answer(request, await admitted(request, self.needs))
        except errors.ANSWERED as error:
            return errors.answer(request, error)


class ServeLookups:
    """Serves these routes, and passes on all other requests; other methods of their paths too."""

    def __init__(self, app: ASGIApp, routes: Iterable[LookupRoute]) -> None:
        self.app = app
        self._routes = {route.path: route for route in routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.get(scope.get("path", ""))
        if route is not None:
            scope["route"] = route  # as FastAPI does: metrics and the audit name it
            if scope["method"] == route.method:
                response = await route.respond(Request(scope, receive, send))
                await response(scope, receive, send)
                return
        await self.app(scope, receive, send)
