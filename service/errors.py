"""Every error the service answers with: one RFC 9457 problem document, whatever went wrong.

A document has `type`, `title`, `status`, `detail` (what is wrong and what to do) and `instance`
(the request); wrong input adds `errors`, one entry per field with the accepted values; what the
caller can do next is in `links`. A fault of ours has one too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import msgspec
import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match, Mount

from gemmsmith.core.choices import suggestion
from gemmsmith.errors import InvalidProblem
from tuner.errors import DatabaseBusy, JobNotFound, SchemaChanged, StoreError

MEDIA_TYPE = "application/problem+json"
_TYPE = "urn:gemmsmith:problem:"
MOST_ERRORS = 10
"""Wrong fields that one document names."""

UNKNOWN_FIELD = "is not a known field; check its spelling"
NO_OBJECT = "a JSON object is required, sent with Content-Type: application/json"

Reason = tuple[str, str | None]
"""Why a value is refused, and what is accepted instead."""

_PLACES = ("query", "body", "path", "header")
_BUSY = "Another process has held the write lock for too long; nothing of this request was changed."
"""The log also says which process it is: nothing for everybody who may ask."""

log = structlog.get_logger("gemmsmith.service")


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldError:
    """What is wrong with one field: where, why, and what it takes."""

    field: str
    message: str
    accepted: str | None = None

    def document(self) -> dict[str, str]:
        entry = {"field": self.field, "message": self.message}
        return entry if self.accepted is None else {**entry, "accepted": self.accepted}


@dataclass(kw_only=True)
class ProblemError(Exception):
    """An error with an answer. `kind` ends its type URI and is stable: programs match on it.

    The title is the kind in words if it is not given.
    """

    status: int
    kind: str
    title: str = ""
    detail: str
    errors: Sequence[FieldError] = ()
    links: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)

    def document(self, instance: str) -> dict[str, Any]:
        """The RFC 9457 document, for the request path (or part of it) `instance`."""
        document: dict[str, Any] = {
            "type": _TYPE + self.kind,
            "title": self.title or self.kind.replace("-", " ").capitalize(),
            "status": self.status,
            "detail": self.detail,
            "instance": instance,
        }
        if self.errors:
            document["errors"] = [error.document() for error in self.errors]
        if self.links:
            document["links"] = dict(self.links)
        return document

    def response(self, instance: str) -> Response:
        """The document as an HTTP response."""
        return Response(
            msgspec.json.encode(self.document(instance)),
            status_code=self.status,
            media_type=MEDIA_TYPE,
            headers=dict(self.headers),
        )


def invalid(errors: Sequence[FieldError]) -> ProblemError:
    """A 422 that names every wrong field and what it takes, or the first of very many."""
    more = len(errors) - MOST_ERRORS
    errors = errors[:MOST_ERRORS]
    detail = "; ".join(
        f"{error.field}: {error.message}"
        + (f" (accepted: {error.accepted})" if error.accepted else "")
        for error in errors
    )
    if more > 0:
        detail += f"; and {more} more"
    return ProblemError(status=422, kind="invalid-input", detail=detail, errors=errors)


def invalid_field(name: str, message: str, accepted: str | None = None) -> ProblemError:
    return invalid([FieldError(field=name, message=message, accepted=accepted)])


def not_a_choice(value: object, choices: Iterable[str]) -> Reason:
    """Why to refuse a value that is not one of these."""
    *others, last = map(repr, map(str, choices))
    accepted = f"{', '.join(others)} or {last}" if others else last
    return f"unknown: {value!r:.80}{suggestion(str(value), choices)}", accepted


def from_validation(errors: Sequence[Mapping[str, Any]]) -> ProblemError:
    """The 422 for pydantic's list of errors."""
    if any(error["type"] == "json_invalid" for error in errors):
        return ProblemError(
            status=400,
            kind="invalid-json",
            title="Invalid JSON",
            detail=f"The body is not JSON: {errors[0].get('ctx', {}).get('error', 'unreadable')}.",
        )
    return invalid([_field_error(error) for error in errors])


def not_found(what: str, detail: str, links: Mapping[str, Any] | None = None) -> ProblemError:
    """A 404 about a thing named in the path."""
    return ProblemError(
        status=404, kind="not-found", title=f"{what} not found", detail=detail, links=links or {}
    )


ANSWERED = (
    ProblemError, RequestValidationError, InvalidProblem, JobNotFound, StoreError, HTTPException,
)  # fmt: skip
"""The exceptions that `answer` takes. All others are internal errors."""


def install(app: FastAPI) -> None:
    """Make every error of `app`, the framework's own included, a problem document."""

    async def handler(request: Request, error: Exception) -> Response:
        return answer(request, error)

    for kind in ANSWERED:
        app.add_exception_handler(kind, handler)


def answer(request: Request, error: Exception) -> Response:
    """The problem document of one of the `ANSWERED` exceptions."""
    return _problem(request, error).response(request.url.path)


def _problem(request: Request, error: Exception) -> ProblemError:
    match error:
        case ProblemError():
            return error
        case RequestValidationError():
            return from_validation(error.errors())
        case InvalidProblem():
            return invalid_field(error.field, str(error))
        case JobNotFound():
            return not_found("Job", str(error), {"jobs": {"href": "/jobs"}})
        case HTTPException():
            return from_status(request, error)
    log.error("store unusable", path=request.url.path, error=str(error))
    migrated = isinstance(error, SchemaChanged)
    return ProblemError(
        status=503,
        kind="schema-mismatch" if migrated else "store-unavailable",
        title="Database schema mismatch" if migrated else "The database cannot be used",
        detail=_BUSY if isinstance(error, DatabaseBusy) else str(error),
        headers={"Retry-After": "5"},
    )


def from_status(request: Request, error: HTTPException) -> ProblemError:
    """The framework's own errors (no such path, wrong method, unreadable body) as ours."""
    status = HTTPStatus(error.status_code)
    headers = dict(error.headers or {})
    if status is HTTPStatus.NOT_FOUND:
        detail = f"There is nothing at {request.url.path}; /docs lists all routes."
    elif status is HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = headers["Allow"] = ", ".join(_methods(request)) or "GET, HEAD"
        detail = f"{request.method} is not allowed on {request.url.path}; allowed: {allowed}."
    else:
        detail = str(error.detail or status.description)
    return ProblemError(
        status=status.value,
        kind=status.phrase.lower().replace(" ", "-"),
        title=status.phrase,
        detail=detail,
        headers=headers,
    )


def _methods(request: Request) -> list[str]:
    """What the path takes. The framework names only the methods of one of its routes."""
    taken = [
        method
        for method in ("DELETE", "GET", "POST")
        if any(
            not isinstance(route, Mount)
            and route.matches({**request.scope, "method": method})[0] is Match.FULL
            for route in request.app.routes
        )
    ]
    return sorted([*taken, "HEAD"]) if "GET" in taken else taken  # see `AnswerHead`


def _field_error(error: Mapping[str, Any]) -> FieldError:
    """One pydantic error, without pydantic's words for where it came from."""
    where = [str(part) for part in error["loc"]]
    whole = where.pop(0) if where and where[0] in _PLACES else "body"
    kind, context = error["type"], error.get("ctx", {})
    message, accepted = str(error["msg"]), None
    match kind:
        case "missing":
            message = "is required"
            if not where:
                message = NO_OBJECT
        case "extra_forbidden":
            message = UNKNOWN_FIELD
        case "enum" | "literal_error":
            choices = re.findall(r"'([^']+)'", context["expected"])
            message, accepted = not_a_choice(error["input"], choices)
        case "model_attributes_type" | "dict_type" | "model_type":
            message = NO_OBJECT
        case "value_error":
            message = str(context.get("error", message))
    return FieldError(
        field=".".join(where) or whole,
        message=message,
        accepted=accepted or context.get("accepted"),
    )
