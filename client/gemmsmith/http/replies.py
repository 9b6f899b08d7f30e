"""Reads the replies of a service.

Nothing here opens a socket, sleeps or touches a file. An unreadable reply raises `ServiceFault`
with the reason, and no other exception.
"""

from __future__ import annotations

import http
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from gemmsmith.answers import understood
from gemmsmith.answers.answer import Answer
from gemmsmith.answers.snapshot import Snapshot
from gemmsmith.errors import (
    Busy,
    Forbidden,
    InvalidProblem,
    NotTuned,
    NotUnderstood,
    Rejected,
    ServiceError,
    ServiceFault,
    SnapshotCorrupt,
    Unauthorized,
)

T = TypeVar("T")

SCHEMA = 1
"""Schema of listings such as `GET /results`. It grows if older clients would misread them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """A complete HTTP response; header names are in lower case.

    Attributes:
        reason: why its body was not read (`gemmsmith.core.bounds`); None if it was read.
    """

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    reason: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class NoAnswer:
    """There is no response: the connection was refused, timed out or broke. `reason` says why."""

    reason: str


Reply = Response | NoAnswer


def document(response: Response) -> dict[str, Any]:
    """The JSON object in a response; raises ServiceFault if the body is something else."""
    parsed = _parsed(response.body)
    if parsed is None:
        raise _unreadable(response, "a JSON object")
    return parsed


def _parsed(body: bytes) -> dict[str, Any] | None:
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):  # a list in a list in a list …
        return None
    return parsed if isinstance(parsed, dict) else None


def _unreadable(response: Response, expected: str) -> ServiceFault:
    kind = response.headers.get("content-type", "no content type")
    return ServiceFault(
        response.status,
        "Unreadable answer",
        f"expected {expected}, got {len(response.body)} bytes of {kind}; "
        "is this URL a gemmsmith service of this version?",
    )


def read(response: Response, kind: type[T]) -> T:
    """Decode a JSON body; fields that only a newer service has are ignored.

    Raises:
        NotUnderstood: an answer that only a newer gemmsmith can run.
        ServiceFault: not JSON, or not of this shape.
    """
    try:
        return understood.decode(response.body, kind)
    except understood.NotKnownHere as error:
        if kind is Answer:
            # Without a cause, because a traceback would show what the service sent.
            raise _not_understood(response.status, error) from None
        raise _unreadable(response, f"{kind.__name__} ({error})") from None
    except (msgspec.DecodeError, InvalidProblem, RecursionError) as error:
        raise _unreadable(response, f"{kind.__name__} ({error})") from None


def _not_understood(status: int, error: understood.NotKnownHere) -> NotUnderstood:
    return NotUnderstood(
        status,
        "Not known to this version",
        f"the service's answer has what this gemmsmith does not know ({error}): upgrade the "
        "library to run it; until then run torch's own operator",
    )


def read_list(response: Response, name: str) -> list[Any]:
    """The list `name` in a JSON object; raises ServiceFault for a body of another shape."""
    rows = document(response).get(name)
    if not isinstance(rows, list):
        raise _unreadable(response, f"a list `{name}`")
    return rows


def read_answers(response: Response) -> list[Answer | ServiceError]:
    """The answers of a batch, in the order of its problems.

    A problem document becomes its exception. An answer that this version does not understand
    becomes a `NotUnderstood`.

    Raises:
        ServiceFault: the body has another shape.
    """
    answers: list[Answer | ServiceError] = []
    for entry in read_list(response, "answers"):
        if isinstance(entry, dict) and "problem" not in entry and "title" in entry:
            status = entry.get("status")
            status = status if isinstance(status, int) else 404
            answers.append(problem_error(status, entry, lookup=True))
            continue
        try:
            answers.append(understood.convert(entry, Answer))
        except understood.NotKnownHere as error:
            answers.append(_not_understood(response.status, error))
        except (msgspec.ValidationError, InvalidProblem, RecursionError) as error:
            raise _unreadable(response, f"answers ({error})") from None
    return answers


def read_snapshot(response: Response) -> Snapshot:
    """The snapshot of `GET /snapshot`; raises ServiceFault if the body is not a snapshot."""
    try:
        return Snapshot.parse(response.body)
    except SnapshotCorrupt as error:
        raise _unreadable(response, f"a snapshot of winners ({error})") from None


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds of the header `Retry-After`. Returns None without one, or if it is a date."""
    try:
        seconds = float(headers.get("retry-after", ""))
    except ValueError:
        return None
    return seconds if 0 <= seconds < 86_400 else None


def check(response: Response, *, lookup: bool = False) -> Response:
    """The response itself if it is a success.

    Raises:
        ServiceError: the subclass for the status, from its problem document. With `lookup`, a 404
            problem document is `NotTuned`.
        ServiceFault: its body was refused, or it is a redirect.
    """
    if response.reason is not None:
        raise ServiceFault(response.status, "Answer refused", response.reason)
    if response.status < 300:
        return response
    if response.status < 400:
        raise _redirected(response)
    problem = _parsed(response.body) or {}
    if not problem.get("detail"):
        problem = problem | {"detail": f"no problem document in {len(response.body)} bytes of body"}
        # This 404 comes from another kind of server: the URL is wrong.
        lookup = False
    raise problem_error(response.status, problem, lookup=lookup, wait=retry_after(response.headers))


def _text(value: object) -> str:
    # JSON may hold half of a surrogate pair, which cannot be encoded.
    return str(value or "").encode(errors="replace").decode()


def _redirected(response: Response) -> ServiceFault:
    # It is not followed: only the caller decides who gets the key.
    place = response.headers.get("location", "").partition("?")[0]
    advice = f"to {place}: use that server's URL" if place else "to nowhere: is the URL right?"
    return ServiceFault(response.status, "Redirected", f"the service's URL redirects {advice}")


def problem_error(
    status: int, problem: dict[str, Any], *, lookup: bool = False, wait: float | None = None
) -> ServiceError:
    """The exception for a problem document (RFC 9457)."""
    known = {int(code) for code in http.HTTPStatus}
    phrase = http.HTTPStatus(status).phrase if status in known else ""
    title, detail = _text(problem.get("title") or phrase), _text(problem.get("detail"))
    if status in (429, 503):
        return Busy(status, title, detail, problem, 1.0 if wait is None else wait)
    kind: type[ServiceError] = Rejected
    if status >= 500:
        kind = ServiceFault
    elif status == 404 and lookup and not str(problem.get("type", "")).endswith(":not-found"):
        kind = NotTuned
    elif status == 401:
        kind = Unauthorized
        detail += (
            " Pass it as api_key=, or set GEMMSMITH_API_KEY, and GEMMSMITH_URL to the service "
            "that it is for."
        )
    elif status == 403:
        kind = Forbidden
    return kind(status, title, detail, problem)
