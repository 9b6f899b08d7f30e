"""What people pass: values that are one of a fixed few, and integers of any library."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from numbers import Integral
from typing import TypeVar

from gemmsmith.errors import InvalidProblem

_E = TypeVar("_E", bound=StrEnum)


def member(field: str, kind: type[_E], value: str) -> _E:
    """The member of a closed list by its text.

    Raises:
        InvalidProblem: names the field and what it accepts.
    """
    try:
        return kind(value)
    except ValueError:
        raise not_one_of(field, tuple(kind), value) from None


def not_one_of(field: str, choices: Iterable[str], value: object, what: str = "") -> InvalidProblem:
    """The error for a value that is not one of a fixed few; the message names them all."""
    shown = value.value if isinstance(value, StrEnum) else repr(value)
    return InvalidProblem(field, f"{field} must be one of {', '.join(choices)}{what}, got {shown}")


def integer(value: object) -> int | None:
    """The integer as Python's own, numpy's too; None for what is none, as booleans are."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        return None
    return int(value)
