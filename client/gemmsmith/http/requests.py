"""What is asked of a service, without asking: requests to build.

Nothing here opens a socket, sleeps or touches a file, so the synchronous and the asynchronous
client share every line of it. What cannot be right is refused before anything is sent.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, SupportsIndex
from urllib.parse import quote

from gemmsmith.choices import integer, member
from gemmsmith.elements import TypeName
from gemmsmith.errors import InvalidProblem
from gemmsmith.operation import Grouping, Operation
from gemmsmith.problem import Problem
from gemmsmith.tuning import Effort

BATCH_LIMIT = 256
"""Problems per `POST /best:batch`; longer lists are sent in several requests."""
RUNS = "Gemmsmith-Runs"
"""The header in which a client says which backends' kernels it can run, separated by spaces."""
MAX_CALLS = 10**15
"""Most calls that one request may give its problem: a billion steps of a million calls."""
MAX_DEADLINE_S = 30 * 86_400
"""Latest deadline that a request may have, in seconds from then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One HTTP request. All of this library may be repeated safely but those of `choice_request`.

    Attributes:
        delay: seconds to wait before it is sent (back-off after a failed attempt).
        read_timeout: overrides the client's read timeout when set.
        bound: which of `gemmsmith.bounds.Bounds` holds for what comes back.
    """

    method: str
    path: str
    params: tuple[tuple[str, str], ...] = ()
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes | None = None
    delay: float = 0.0
    read_timeout: float | None = None
    bound: str = "answer_bytes"


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """A lookup: the problem and on which device model it is asked."""

    problem: Problem
    device: str | None = None
    arch: str | None = None
    exact: bool = False


def tune_call(query: Query) -> str:
    """The call of a client that would order the tuning of what is asked, as Python writes it."""
    device = "" if query.device is None else f", device={query.device!r}"
    return f"client.tune({query.problem.arguments}{device})"


def problem_of(
    m: SupportsIndex,
    n: SupportsIndex,
    k: SupportsIndex,
    *,
    batch: SupportsIndex,
    dtype: TypeName,
    layout: str,
    groups: SupportsIndex | None = None,
    out: TypeName | None = None,
    scaling: str | None = None,
    grouping: str | None = None,
    epilogue: str | None = None,
    accumulate: bool | None = None,
) -> Problem:
    """The problem by what people and requests say of it; what is None is as `dtype` says.

    `groups` is what the batch of a grouped operation is called.

    Raises:
        InvalidProblem: names the field and what it accepts.
    """
    operation = Operation.of(
        dtype,
        layout,
        out=out,
        scaling=scaling,
        grouping=grouping,
        epilogue=epilogue,
        accumulate=accumulate,
    )
    if groups is not None:
        if operation.grouping is Grouping.NONE:
            raise InvalidProblem("groups", "groups needs grouping=rows or grouping=depth")
        if batch not in (1, groups):
            raise InvalidProblem(
                "groups", f"groups is the batch of a grouped operation, and batch is {batch}"
            )
        batch = groups
    return Problem.of(operation, m, n, k, batch)


def effort_of(effort: str) -> Effort:
    """The effort by its name.

    Raises:
        InvalidProblem: not one of the efforts; the message names them.
    """
    return member("effort", Effort, effort)


def calls_of(calls: int) -> int:
    """The number of calls, checked.

    Raises:
        InvalidProblem: not an integer, or out of range; the message has the range.
    """
    found = integer(calls)
    if found is None or not 0 <= found <= MAX_CALLS:
        raise InvalidProblem("calls", f"calls must be an integer in 0 … {MAX_CALLS}, got {calls!r}")
    return found


def deadline_of(deadline_s: int | None) -> int | None:
    """The deadline, checked: seconds from now, or None for none.

    Raises:
        InvalidProblem: not an integer, or out of range; the message has the range.
    """
    if deadline_s is None:
        return None
    found = integer(deadline_s)
    if found is None or not 1 <= found <= MAX_DEADLINE_S:
        raise InvalidProblem(
            "deadline_s",
            f"deadline_s must be an integer in 1 … {MAX_DEADLINE_S}, got {deadline_s!r}",
        )
    return found


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


def get(path: str, /, **params: object) -> Request:
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


def job_path(identifier: str) -> str:
    """The path of a job, whatever characters its identifier has."""
    return f"/jobs/{quote(identifier, safe='')}"


def retry_request(identifier: str) -> Request:
    """`POST /jobs/{id}/retry` with an Idempotency-Key, so that repeating it orders one job."""
    return Request(
        method="POST",
        path=f"{job_path(identifier)}/retry",
        headers=(("idempotency-key", uuid.uuid4().hex),),
    )


def choice_request(
    verb: str, problem: Problem, *, device: str | None, revision: int | None
) -> Request:
    """`POST /winners/{verb}`: a person's choice of what is served for the problem."""
    chosen = {"device": device, "revision": revision}
    given = {name: value for name, value in chosen.items() if value is not None}
    return _post(f"/winners/{verb}", fields_of(problem) | given)


def pack_request(pack_hash: str) -> Request:
    """`GET /packs/{hash}`."""
    return replace(get(f"/packs/{quote(pack_hash, safe='')}"), bound="pack_bytes")


def snapshot_request(
    device: str | None, arch: str | None, tag: str | None, *, since: str | None = None
) -> Request:
    """`GET /snapshot`, of the device model's winners unless they still have that `tag`.

    With `since`, what has changed after that revision will do.
    """
    request = get("/snapshot", device=device, arch=arch, since=since)
    request = replace(request, bound="snapshot_bytes")
    if tag is None:
        return request
    return replace(request, headers=(*request.headers, ("if-none-match", f'"{tag}"')))
