"""What a service answers: replies to read.

Nothing here opens a socket, sleeps or touches a file, so the synchronous and the asynchronous
client share every line of it. A reply that cannot be understood is a `ServiceFault` that says so,
never a stray `KeyError`. It has no cause, since a traceback would show what the service sent.
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
from gemmsmith.device import DeviceModel
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
"""Of the listings (`GET /results` and its like): counted up when older readers would misread it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """A complete HTTP response; header names are in lower case.

    Attributes:
        refusal: why its body was not read (`gemmsmith.bounds`); None where it was.
    """

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    refusal: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class NoAnswer:
    """No response came: refused, timed out, cut off. `reason` is for people."""

    reason: str


Reply = Response | NoAnswer


def document(response: Response) -> dict[str, Any]:
    """The JSON object in a response.

    Raises:
        ServiceFault: the body is not a JSON object.
    """
    parsed = _parsed(response.body)
    if parsed is None:
        raise _unreadable(response, "a JSON object")
    return parsed


def _parsed(body: bytes) -> dict[str, Any] | None:
    """The JSON object in a body; None where there is none."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):  # a list in a list in a list …
        return None
    return found if isinstance(found, dict) else None


def _unreadable(response: Response, wanted: str) -> ServiceFault:
    kind = response.headers.get("content-type", "no content type")
    return ServiceFault(
        response.status,
        "Unreadable answer",
        f"expected {wanted}, got {len(response.body)} bytes of {kind}; "
        "is this URL a gemmsmith service of this version?",
    )


def read(response: Response, kind: type[T]) -> T:
    """Decode a JSON body as `gemmsmith.answers.understood` does, so that newer services stay
    readable.

    Raises:
        NotUnderstood: an answer that a newer gemmsmith can run.
        ServiceFault: not JSON, or not of this shape.
    """
    try:
        return understood.decode(response.body, kind)
    except understood.NotKnownHere as error:
        if kind is Answer:
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


def read_answers(response: Response) -> list[Answer | ServiceError]:
    """The answers of a batch in the order asked; a problem document becomes its exception.

    So does an answer that this version does not understand: a `NotUnderstood`.

    Raises:
        ServiceFault: the body has another shape.
    """
    entries = document(response).get("answers")
    if not isinstance(entries, list):
        raise _unreadable(response, "a list `answers`")
    answers: list[Answer | ServiceError] = []
    for entry in entries:
        if isinstance(entry, dict) and "problem" not in entry and "title" in entry:
            status = entry.get("status")
            answers.append(
                problem_error(status if isinstance(status, int) else 404, entry, lookup=True)
            )
            continue
        try:
            answers.append(understood.convert(entry, Answer))
        except understood.NotKnownHere as error:
            answers.append(_not_understood(response.status, error))
        except (msgspec.ValidationError, InvalidProblem, RecursionError) as error:
            raise _unreadable(response, f"answers ({error})") from None
    return answers


def read_snapshot(response: Response) -> Snapshot:
    """The snapshot of `GET /snapshot`.

    Raises:
        ServiceFault: the body is not a snapshot.
    """
    try:
        return Snapshot.parse(response.body)
    except SnapshotCorrupt as error:
        raise _unreadable(response, f"a snapshot of winners ({error})") from None


def read_devices(response: Response) -> list[DeviceModel]:
    """The device models of `GET /devices` that this version understands.

    Raises:
        ServiceFault: the body has another shape.
    """
    rows = document(response).get("devices")
    if not isinstance(rows, list):
        raise _unreadable(response, "a list `devices`")
    return understood.each(rows, DeviceModel, "device models")


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds the service asked to be left alone; None when it did not say (or gave a date)."""
    try:
        seconds = float(headers.get("retry-after", ""))
    except ValueError:
        return None
    return seconds if 0 <= seconds < 86_400 else None


def check(response: Response, *, lookup: bool = False) -> Response:
    """The response itself when it is a success.

    Raises:
        ServiceError: the subclass that the status calls for, from its problem document. With
            `lookup`, a 404 problem document is `NotTuned`.
        ServiceFault: its body was refused, or it is a redirect.
    """
    if response.refusal is not None:
        raise ServiceFault(response.status, "Answer refused", response.refusal)
    if response.status < 300:
        return response
    if response.status < 400:
        raise _redirected(response)
    found = _parsed(response.body) or {}
    if not found.get("detail"):
        found = found | {"detail": f"no problem document in {len(response.body)} bytes of body"}
        lookup = False  # this 404 is somebody else's: the URL is wrong, not the problem untuned
    raise problem_error(response.status, found, lookup=lookup, wait=retry_after(response.headers))


def _text(value: object) -> str:
    """What JSON has as text, which may be half of a character that cannot be encoded."""
    return str(value or "").encode(errors="replace").decode()


def _redirected(response: Response) -> ServiceFault:
    """The error for a redirect, which is not followed: who gets the key is the caller's to say."""
    place = response.headers.get("location", "").partition("?")[0]
    advice = f"to {place}: use that server's URL" if place else "to nowhere: is the URL right?"
    return ServiceFault(response.status, "Redirected", f"the service's URL redirects {advice}")


def problem_error(
    status: int, found: dict[str, Any], *, lookup: bool = False, wait: float | None = None
) -> ServiceError:
    """The exception that a problem document stands for."""
    known = {int(code) for code in http.HTTPStatus}
    phrase = http.HTTPStatus(status).phrase if status in known else ""
    title, detail = _text(found.get("title") or phrase), _text(found.get("detail"))
    if status in (429, 503):
        return Busy(status, title, detail, found, 1.0 if wait is None else wait)
    if status >= 500:
        return ServiceFault(status, title, detail, found)
    if status == 404 and lookup and not str(found.get("type", "")).endswith(":not-found"):
        return NotTuned(status, title, detail, found)
    if status == 401:
        hint = (
            "Pass it as api_key=, or set GEMMSMITH_API_KEY, and GEMMSMITH_URL to the service that "
            "it is for."
        )
        return Unauthorized(status, title, f"{detail} {hint}", found)
    if status == 403:
        return Forbidden(status, title, detail, found)
    return Rejected(status, title, detail, found)
