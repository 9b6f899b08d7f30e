"""What goes over the wire, without doing any of it: requests to build, replies to read.

Nothing here opens a socket, sleeps or touches a file, so the synchronous and the asynchronous
client share every line of it. A reply that cannot be understood is a `ServiceFault` that says so,
never a stray `KeyError`.
"""

from __future__ import annotations

import http
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from gemmsmith import understood
from gemmsmith.answer import Answer
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
from gemmsmith.operation import Operation, not_one_of
from gemmsmith.problem import Problem
from gemmsmith.snapshot import Snapshot
from gemmsmith.tuning import Effort

T = TypeVar("T")

PROBLEM_JSON = "application/problem+json"
BATCH_LIMIT = 256
"""Problems per `POST /best:batch`; longer lists are sent in several requests."""
SCHEMA = 1
"""Of the listings (`GET /results` and its like): counted up when older readers would misread it."""
RUNS = "Gemmsmith-Runs"
"""The header in which a client says which backends' kernels it can run, separated by spaces."""
MAX_CALLS = 10**15
"""Most calls that one order may give its problem: a billion steps of a million calls."""
MAX_DEADLINE_S = 30 * 86_400
"""Latest deadline that an order may have, in seconds from then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One HTTP request. All of this library may be repeated safely but those of `choice_request`.

    Attributes:
        delay: seconds to wait before it is sent (back-off after a failed attempt).
        read_timeout: overrides the client's read timeout when set.
    """

    method: str
    path: str
    params: tuple[tuple[str, str], ...] = ()
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes | None = None
    delay: float = 0.0
    read_timeout: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """A complete HTTP response; header names are in lower case."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass(frozen=True, kw_only=True, slots=True)
class NoAnswer:
    """No response came: refused, timed out, cut off. `reason` is for people."""

    reason: str


Reply = Response | NoAnswer


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """A lookup: the problem and on which device model it is asked."""

    problem: Problem
    device: str | None = None
    arch: str | None = None
    exact: bool = False


def problem_of(m: int, n: int, k: int, *, batch: int, dtype: str, layout: str) -> Problem:
    """Check a question before anything is sent.

    Raises:
        InvalidProblem: names the field and what it accepts.
    """
    return Problem.of(Operation.of(dtype, layout), m, n, k, batch)


def effort_of(effort: str) -> Effort:
    """The effort by its name.

    Raises:
        InvalidProblem: not one of the efforts; the message names them.
    """
    if effort not in Effort.__members__.values():
        raise not_one_of("effort", Effort, effort)
    return Effort(effort)


def calls_of(calls: int) -> int:
    """The number of calls, checked.

    Raises:
        InvalidProblem: not an integer, or out of range; the message has the range.
    """
    if isinstance(calls, bool) or not isinstance(calls, int) or not 0 <= calls <= MAX_CALLS:
        raise InvalidProblem("calls", f"calls must be an integer in 0 … {MAX_CALLS}, got {calls!r}")
    return calls


def deadline_of(deadline_s: int | None) -> int | None:
    """The deadline, checked: seconds from now, or None for none.

    Raises:
        InvalidProblem: not an integer, or out of range; the message has the range.
    """
    if deadline_s is None:
        return None
    integer = isinstance(deadline_s, int) and not isinstance(deadline_s, bool)
    if not integer or not 1 <= deadline_s <= MAX_DEADLINE_S:
        raise InvalidProblem(
            "deadline_s",
            f"deadline_s must be an integer in 1 … {MAX_DEADLINE_S}, got {deadline_s!r}",
        )
    return deadline_s


def fields_of(problem: Problem) -> dict[str, Any]:
    """The problem as the fields of a query or a body."""
    return {
        "m": problem.m,
        "n": problem.n,
        "k": problem.k,
        "batch": problem.batch,
        "dtype": problem.dtype,
        "layout": str(problem.layout),
    }


def _post(path: str, body: Mapping[str, Any], *headers: tuple[str, str]) -> Request:
    return Request(
        method="POST",
        path=path,
        headers=(("content-type", "application/json"), *headers),
        body=json.dumps(body).encode(),
    )


def get(path: str, **params: object) -> Request:
    """A GET; parameters that are None are left out, booleans become `true` and `false`."""
    return Request(
        method="GET",
        path=path,
        params=tuple(
            (name, str(value).lower() if isinstance(value, bool) else str(value))
            for name, value in params.items()
            if value is not None
        ),
    )


def best_request(query: Query, etag: str | None = None) -> Request:
    """`GET /best`, revalidating `etag` when the answer is already cached."""
    request = get(
        "/best",
        **fields_of(query.problem),
        device=query.device,
        arch=query.arch,
        exact=query.exact or None,
    )
    return replace(request, headers=(("if-none-match", etag),)) if etag else request


def batch_request(queries: Sequence[Query]) -> Request:
    """`POST /best:batch`; all queries share device, arch and exactness."""
    body: dict[str, Any] = {"problems": [fields_of(query.problem) for query in queries]}
    first = queries[0]
    if first.device is not None:
        body["device"] = first.device
    if first.arch is not None:
        body["arch"] = first.arch
    if first.exact:
        body["exact"] = True
    return _post("/best:batch", body)


def tune_request(
    problem: Problem,
    *,
    effort: Effort,
    priority: int,
    device: str | None,
    calls: int,
    deadline_s: int | None,
) -> Request:
    """`POST /tune` with an Idempotency-Key, so that repeating it enqueues nothing twice."""
    body = fields_of(problem) | {"effort": str(effort), "priority": priority}
    if device is not None:
        body["device"] = device
    if calls:  # services from before there was such a field refuse it
        body["calls"] = calls
    if deadline_s is not None:
        body["deadline_s"] = deadline_s
    return _post("/tune", body, ("idempotency-key", uuid.uuid4().hex))


def retry_request(identifier: str) -> Request:
    """`POST /jobs/{id}/retry` with an Idempotency-Key, so that repeating it orders one job."""
    return Request(
        method="POST",
        path=f"/jobs/{identifier}/retry",
        headers=(("idempotency-key", uuid.uuid4().hex),),
    )


def choice_request(
    verb: str, problem: Problem, *, device: str | None, revision: int | None
) -> Request:
    """`POST /winners/{verb}`: a person's choice of what is served for the problem."""
    chosen = {"device": device, "revision": revision}
    given = {name: value for name, value in chosen.items() if value is not None}
    return _post(f"/winners/{verb}", fields_of(problem) | given)


def snapshot_request(device: str | None, arch: str | None, revision: str | None) -> Request:
    """`GET /snapshot`, of the device model's winners unless they are still `revision`."""
    request = get("/snapshot", device=device, arch=arch)
    if revision is None:
        return request
    return replace(request, headers=(*request.headers, ("if-none-match", f'"{revision}"')))


def document(response: Response) -> dict[str, Any]:
    """The JSON object in a response.

    Raises:
        ServiceFault: the body is not a JSON object.
    """
    try:
        parsed = json.loads(response.body)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise _unreadable(response, "a JSON object")
    return parsed


def _unreadable(response: Response, wanted: str) -> ServiceFault:
    kind = response.headers.get("content-type", "no content type")
    return ServiceFault(
        response.status,
        "Unreadable answer",
        f"expected {wanted}, got {len(response.body)} bytes of {kind}; "
        "is this URL a gemmsmith service of this version?",
    )


def read(response: Response, kind: type[T]) -> T:
    """Decode a JSON body as `gemmsmith.understood` does, so that newer services stay readable.

    Raises:
        NotUnderstood: an answer that a newer gemmsmith can run.
        ServiceFault: not JSON, or not of this shape.
    """
    try:
        return understood.decode(response.body, kind)
    except understood.NotKnownHere as error:
        if kind is Answer:
            raise _not_understood(response.status, error) from error
        raise _unreadable(response, f"{kind.__name__} ({error})") from error
    except (msgspec.DecodeError, InvalidProblem) as error:
        raise _unreadable(response, f"{kind.__name__} ({error})") from error


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
            answers.append(problem_error(int(entry.get("status", 404)), entry, lookup=True))
            continue
        try:
            answers.append(understood.convert(entry, Answer))
        except understood.NotKnownHere as error:
            answers.append(_not_understood(response.status, error))
        except (msgspec.ValidationError, InvalidProblem) as error:
            raise _unreadable(response, f"answers ({error})") from error
    return answers


def read_snapshot(response: Response) -> Snapshot:
    """The snapshot of `GET /snapshot`.

    Raises:
        ServiceFault: the body is not a snapshot.
    """
    try:
        return Snapshot.parse(response.body)
    except SnapshotCorrupt as error:
        raise _unreadable(response, f"a snapshot of winners ({error})") from error


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
    """
    if response.status < 400:
        return response
    try:
        parsed = json.loads(response.body)
    except ValueError:
        parsed = None
    found = parsed if isinstance(parsed, dict) else {}
    if not found.get("detail"):
        found = found | {"detail": f"no problem document in {len(response.body)} bytes of body"}
        lookup = False  # this 404 is somebody else's: the URL is wrong, not the problem untuned
    raise problem_error(response.status, found, lookup=lookup, wait=retry_after(response.headers))


def problem_error(
    status: int, found: dict[str, Any], *, lookup: bool = False, wait: float | None = None
) -> ServiceError:
    """The exception that a problem document stands for."""
    known = {int(code) for code in http.HTTPStatus}
    title = str(found.get("title") or (http.HTTPStatus(status).phrase if status in known else ""))
    detail = str(found.get("detail") or "")
    if status in (429, 503):
        return Busy(status, title, detail, found, 1.0 if wait is None else wait)
    if status >= 500:
        return ServiceFault(status, title, detail, found)
    if status == 404 and lookup and not str(found.get("type", "")).endswith(":not-found"):
        return NotTuned(status, title, detail, found)
    if status == 401:
        hint = "Pass it as api_key=, or set GEMMSMITH_API_KEY."
        return Unauthorized(status, title, f"{detail} {hint}", found)
    if status == 403:
        return Forbidden(status, title, detail, found)
    return Rejected(status, title, detail, found)
