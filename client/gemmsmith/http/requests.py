"""Builds requests to a service, and checks the arguments of a call before anything is sent.

Nothing here opens a socket, sleeps or touches a file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, SupportsIndex
from urllib.parse import quote

from gemmsmith.core.choices import integer, member
from gemmsmith.core.elements import TypeName
from gemmsmith.core.operation import Grouping, Operation
from gemmsmith.core.problem import Problem
from gemmsmith.core.tuning import Effort
from gemmsmith.errors import InvalidProblem

RUNS = "Gemmsmith-Runs"
"""The header with the backends whose kernels a client can run, separated by spaces."""
MAX_CALLS = 10**15
"""Largest number of calls in a request: a billion steps of a million calls."""
MAX_DEADLINE_S = 30 * 86_400
"""Latest deadline of a request, in seconds from the request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """An HTTP request.

    Attributes:
        read_timeout: seconds for an attempt; None for the client's own time-out.
        bound: name of the attribute of `gemmsmith.core.bounds.Bounds` that limits the answer.
    """

    method: str
    path: str
    params: tuple[tuple[str, str], ...] = ()
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes | None = None
    read_timeout: float | None = None
    bound: str = "answer_bytes"

    def with_header(self, name: str, text: str | None) -> Request:
        return replace(self, headers=(*self.headers, (name, text))) if text else self


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """A lookup: the problem, and the device model."""

    problem: Problem
    device: str | None = None
    arch: str | None = None
    exact: bool = False


def problem_of(
    m: SupportsIndex,
    n: SupportsIndex,
    k: SupportsIndex,
    *,
    batch: SupportsIndex,
    dtype: TypeName,
    layout: str,
    groups: SupportsIndex | None = None,
    **others: Any,
) -> Problem:
    """The problem with these fields. Those that are None follow from `dtype`.

    `groups` is another name for the batch of a grouped operation; `others` are arguments of
    `Operation.of`.

    Raises:
        InvalidProblem: names the field and its valid values.
    """
    operation = Operation.of(dtype, layout, **others)
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
    """The effort by its name; raises InvalidProblem, which lists the names of all efforts."""
    return member("effort", Effort, effort)


def calls_of(calls: int) -> int:
    """The number of calls; raises InvalidProblem if it is not an integer in the range."""
    return _in_range("calls", calls, 0, MAX_CALLS)


def deadline_of(deadline_s: int | None) -> int | None:
    """The deadline in seconds from now, or None; raises InvalidProblem as `calls_of` does."""
    return None if deadline_s is None else _in_range("deadline_s", deadline_s, 1, MAX_DEADLINE_S)


def _in_range(name: str, value: int, least: int, most: int) -> int:
    number = integer(value)
    if number is None or not least <= number <= most:
        raise InvalidProblem(name, f"{name} must be an integer in {least} … {most}, got {value!r}")
    return number


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


def get(path: str, /, **params: object) -> Request:
    """A GET. Parameters that are None are left out; booleans become `true` and `false`."""
    return Request(
        method="GET",
        path=path,
        params=tuple(
            (name, str(value).lower() if isinstance(value, bool) else str(value))
            for name, value in params.items()
            if value is not None
        ),
    )


def post(path: str, body: Mapping[str, Any]) -> Request:
    fields = {name: value for name, value in body.items() if value is not None}
    request = Request(method="POST", path=path, body=json.dumps(fields).encode())
    return request.with_header("content-type", "application/json")


def job_path(identifier: str) -> str:
    return f"/jobs/{quote(identifier, safe='')}"
