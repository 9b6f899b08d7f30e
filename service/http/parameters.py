"""The single values that requests may say, each with what it accepts, for people and for OpenAPI.

Sizes must be integers as written: no floats, no booleans, no numbers in quotes inside JSON.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, GetPydanticSchema, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError, core_schema

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
_PARTS = (
    f"(\\.out_({'|'.join(Element)}))?(\\.scale_({'|'.join(Scaling)}))?"
    f"(\\.group_({'|'.join(Grouping)}))?(\\.then_({'|'.join(Epilogue)}))?(\\.accumulate)?"
)
_CANONICAL = f"({'|'.join(DType)}){_PARTS}"
DTYPE_PATTERN = f"({'|'.join([*DType, *OPERANDS])}){_PARTS}"
"""A `dtype` under any of its names."""


def integer_in(text: str) -> int | str:
    return int(text) if _DIGITS.fullmatch(text) else text


def integer_reason(value: object, low: int, high: int) -> Reason:
    """Why to refuse a value that is not an integer in low … high."""
    accepted = f"an integer in {low} … {high}"
    if isinstance(value, bool) or not isinstance(value, int):
        return f"must be an integer, got {repr(value)[:40]}", accepted
    shown = str(value) if abs(value) < 10**19 else "a far larger number"
    return f"is out of range: {shown}", accepted


def _integer(low: int, high: int, *, text: bool = False) -> GetPydanticSchema:
    """An integer in low … high, out of a query string (`text`) or out of JSON."""

    def check(value: Any) -> int:
        if text and isinstance(value, str):
            value = integer_in(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise _refusal(integer_reason(value, low, high))
        return value

    return GetPydanticSchema(  # a new one each time, as pydantic adds a field's description to it
        lambda *_: core_schema.no_info_plain_validator_function(
            check, json_schema_input_schema=core_schema.int_schema(ge=low, le=high)
        )
    )


def _refusal(reason: Reason) -> PydanticCustomError:
    message, accepted = reason
    return PydanticCustomError("refused", "{message}", {"message": message, "accepted": accepted})


def _text_that(is_right: Callable[[str], object], wrong: str, accepted: str) -> BeforeValidator:
    def check(value: Any) -> str:
        if isinstance(value, str) and is_right(value):
            return value
        raise _refusal((f"{wrong}: {repr(value)[:80]}", accepted))

    return BeforeValidator(check)


def winner_cursor(problem: Problem) -> str:
    """Where a page of winners ends. Opaque to clients."""
    sizes = f"{problem.batch}-{problem.m}-{problem.n}-{problem.k}"
    return f"{problem.dtype}-{problem.layout}-{sizes}"


def _after_winner(value: Any) -> Problem:
    try:
        dtype, layout, *sizes = str(value).split("-")
        batch, m, n, k = (int(size) for size in sizes if _DIGITS.fullmatch(size))
        return Problem(m=m, n=n, k=k, batch=batch, dtype=dtype, layout=Layout(layout))
    except ValueError:
        accepted = "the `after` of a page's `links.next`"
        raise _refusal((f"is no cursor of this list: {repr(value)[:80]}", accepted)) from None


@functools.lru_cache(maxsize=4096)
def canonical_dtype(value: Any) -> str:
    """The `dtype` that is written under any of its names.

    Raises:
        InvalidProblem: it is not a `dtype`.
    """
    return of_dtype(value if isinstance(value, str) else "").dtype


def dtype_reason(value: Any) -> Reason:
    """Why to refuse a value that is not a `dtype` under any of its names."""
    accepted = ", ".join(DType)
    if isinstance(value, str) and value.partition(".")[0] in DType.__members__.values():
        try:
            of_dtype(value)
        except InvalidProblem as error:
            return str(error), accepted
    return f"unknown: {value!r:.80}{suggestion(str(value), DType)}", accepted


def _dtype(value: Any) -> str:
    try:
        return canonical_dtype(value)
    except (InvalidProblem, TypeError):  # a list cannot be hashed
        raise _refusal(dtype_reason(value)) from None


def _pattern(pattern: str, description: str | None = None) -> WithJsonSchema:
    more = {"description": description} if description else {}
    return WithJsonSchema({"type": "string", "pattern": f"^{pattern}$", **more})


DTypeName = Annotated[
    str,
    BeforeValidator(_dtype),
    _pattern(DTYPE_PATTERN, "Element types, and what differs from their defaults"),
]
LayoutName = Annotated[
    Layout, BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value)
]
QueryExtent = Annotated[int, _integer(1, MAX_EXTENT, text=True)]
Extent = Annotated[int, _integer(1, MAX_EXTENT)]
PageLimit = Annotated[int, _integer(1, MAX_PAGE, text=True)]
Cursor = Annotated[int, _integer(0, 2**62, text=True)]
Number = Annotated[int, _integer(0, _MOST, text=True)]
"""Of a revision or an event: columns of 32 bits, which PostgreSQL compares with no larger one."""
Priority = Annotated[int, _integer(-MAX_PRIORITY, MAX_PRIORITY)]
Calls = Annotated[int, _integer(0, MAX_CALLS)]
DeadlineSeconds = Annotated[int, _integer(1, MAX_DEADLINE_S)]
KeyLife = Annotated[int, _integer(1, LONGEST_LIFE_S)]
JobLimit = Annotated[int, _integer(1, MOST_JOBS)]
KeyName = Annotated[
    str, _text_that(is_name, "is no name for a key", NAME_RULE), _pattern(NAME_PATTERN, NAME_RULE)
]
Sha256 = Annotated[
    str,
    _text_that(_SHA256.fullmatch, "is not a SHA-256", "64 hexadecimal digits in lower case"),
    _pattern(_SHA256.pattern),
]
WinnerCursor = Annotated[
    Problem,
    PlainValidator(_after_winner),
    _pattern(
        f"{_CANONICAL}-({'|'.join(Layout)})(-[1-9][0-9]{{0,9}}){{4}}",
        "From the `links.next` of a page",
    ),
]
Slug = Annotated[str, Field(max_length=200, description="A device model's slug, see /devices")]
