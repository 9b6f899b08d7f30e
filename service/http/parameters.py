"""The single values that requests may say, each with what it accepts, for people and for OpenAPI.

Sizes must be integers as written: no floats, no booleans, no numbers in quotes inside JSON. A text
that is more than a length has a function that reads it, or raises `WrongValue`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Annotated, Any

from msgspec import Meta

from gemmsmith.core.choices import suggestion
from gemmsmith.core.operands import OPERANDS
from gemmsmith.core.operation import DType, Element, Epilogue, Grouping, Layout, Scaling, of_dtype
from gemmsmith.core.problem import MAX_EXTENT, Problem
from gemmsmith.errors import InvalidProblem
from gemmsmith.http.requests import MAX_CALLS, MAX_DEADLINE_S
from service.errors import Reason
from tuner.store.keys import LONGEST_LIFE_S, MOST_JOBS, NAME_PATTERN, NAME_RULE, is_name

MAX_PAGE = 1000
MAX_PRIORITY = 100
_MOST = 2**31 - 1

_DIGITS = re.compile(r"-?[0-9]{1,19}", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHORT_NAMES = frozenset(DType.__members__.values())
_PARTS = (
    f"(\\.out_({'|'.join(Element)}))?(\\.scale_({'|'.join(Scaling)}))?"
    f"(\\.group_({'|'.join(Grouping)}))?(\\.then_({'|'.join(Epilogue)}))?(\\.accumulate)?"
    "(\\.symmetric)?"
)


class WrongValue(ValueError):
    """Why a value is refused, and what is accepted instead."""

    def __init__(self, message: str, accepted: str) -> None:
        super().__init__(message)
        self.reason: Reason = message, accepted


def integer_in(text: str) -> int | str:
    return int(text) if _DIGITS.fullmatch(text) else text


def _text(read: Callable[[Any], str], pattern: str, description: str | None = None) -> Meta:
    schema = {"pattern": f"^{pattern}$"}
    return Meta(description=description, extra={"read": read}, extra_json_schema=schema)


def _text_that(
    is_right: Callable[[str], object], wrong: str, accepted: str
) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        if isinstance(value, str) and is_right(value):
            return value
        raise WrongValue(f"{wrong}: {repr(value)[:80]}", accepted)

    return check


def problem_after(cursor: str) -> Problem:
    """The problem after which a page of winners begins.

    Raises:
        WrongValue: it is not the result of `winner_cursor`.
    """
    try:
        dtype, layout, *sizes = cursor.split("-")
        batch, m, n, k = (int(size) for size in sizes if _DIGITS.fullmatch(size))
        return Problem(m=m, n=n, k=k, batch=batch, dtype=dtype, layout=Layout(layout))
    except ValueError:
        accepted = "the `after` of a page's `links.next`"
        raise WrongValue(f"is no cursor of this list: {repr(cursor)[:80]}", accepted) from None


def winner_cursor(problem: Problem) -> str:
    """Where a page of winners ends. Opaque to clients."""
    sizes = f"{problem.batch}-{problem.m}-{problem.n}-{problem.k}"
    return f"{problem.dtype}-{problem.layout}-{sizes}"


@functools.lru_cache(maxsize=4096)
def _canonical_dtype(value: Any) -> str:
    return of_dtype(value if isinstance(value, str) else "").dtype


def _dtype(value: Any) -> str:
    """The `dtype` that is written under any of its names."""
    try:
        return value if value in _SHORT_NAMES else _canonical_dtype(value)
    except (InvalidProblem, TypeError) as error:  # a list cannot be hashed
        message = f"unknown: {value!r:.80}{suggestion(str(value), DType)}"
        if isinstance(value, str) and value.partition(".")[0] in _SHORT_NAMES:
            message = str(error)
        raise WrongValue(message, ", ".join(DType)) from None


DTypeName = Annotated[
    str,
    _text(
        _dtype,
        f"({'|'.join([*DType, *OPERANDS])}){_PARTS}",
        "Element types, and what differs from their defaults",
    ),
]
LayoutName = Annotated[
    Layout,
    Meta(extra={"read": lambda value: value.lower() if isinstance(value, str) else value}),
]
KeyName = Annotated[
    str, _text(_text_that(is_name, "is no name for a key", NAME_RULE), NAME_PATTERN, NAME_RULE)
]
Sha256 = Annotated[
    str,
    _text(
        _text_that(_SHA256.fullmatch, "is not a SHA-256", "64 hexadecimal digits in lower case"),
        _SHA256.pattern,
    ),
]
WinnerCursor = Annotated[
    str,
    _text(
        lambda value: winner_cursor(problem_after(value)),
        f"({'|'.join(DType)}){_PARTS}-({'|'.join(Layout)})(-[1-9][0-9]{{0,9}}){{4}}",
        "From the `links.next` of a page",
    ),
]
Extent = Annotated[int, Meta(ge=1, le=MAX_EXTENT)]
PageLimit = Annotated[int, Meta(ge=1, le=MAX_PAGE)]
Cursor = Annotated[int, Meta(ge=0, le=2**62)]
Number = Annotated[int, Meta(ge=0, le=_MOST)]
"""Of a revision or an event: columns of 32 bits, which PostgreSQL compares with no larger one."""
Priority = Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
Calls = Annotated[int, Meta(ge=0, le=MAX_CALLS)]
DeadlineSeconds = Annotated[int, Meta(ge=1, le=MAX_DEADLINE_S)]
KeyLife = Annotated[int, Meta(ge=1, le=LONGEST_LIFE_S)]
JobLimit = Annotated[int, Meta(ge=1, le=MOST_JOBS)]
Text = Annotated[str, Meta(max_length=200)]
Slug = Annotated[str, Meta(max_length=200, description="A device model's slug, see /devices")]
