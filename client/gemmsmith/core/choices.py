"""Checks of what users pass: values out of a closed list, and integers of any library."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from functools import lru_cache
from numbers import Integral
from typing import TypeVar

from gemmsmith.errors import InvalidProblem

_E = TypeVar("_E", bound=StrEnum)

NAMED = 10
"""A message that suggests a choice lists all choices only if there are no more than these."""

LONGEST_NAME = 100
"""Longest text, in characters, that is compared with the choices: megabytes would take seconds."""


def member(field: str, kind: type[_E], value: str) -> _E:
    """The member with this value; raises InvalidProblem, which names the field and the values."""
    try:
        return kind(value)
    except ValueError:
        raise not_one_of(field, tuple(kind), value) from None


def not_one_of(
    field: str, choices: Iterable[str], value: object, context: str = ""
) -> InvalidProblem:
    """The error for a value that is not among the choices.

    The message lists all choices if there are few, or if no choice resembles the value. Otherwise
    it says how many there are, and lists those that resemble the value.
    """
    names = list(map(str, choices))
    text = str(value)
    shown = text if isinstance(value, StrEnum) else repr(value)
    meant = suggestion(text, names)
    listed = f"{len(names)} names" if meant and len(names) > NAMED else ", ".join(names)
    return InvalidProblem(field, f"{field} must be one of {listed}{context}, got {shown}{meant}")


def suggestion(text: str, choices: Iterable[str]) -> str:
    """`; did you mean a, b or c?` with the choices that resemble a text; empty if none does."""
    if len(text) > LONGEST_NAME:
        return ""
    *others, last = _similar(text.lower(), tuple(choices)) or [""]
    return f"; did you mean {', '.join(others)}{' or ' if others else ''}{last}?" if last else ""


@lru_cache(maxsize=1024)  # it takes a millisecond, and a search tries parts of a text as names
def _similar(text: str, choices: tuple[str, ...]) -> list[str]:
    from difflib import get_close_matches  # imported only when a name is misspelt

    return get_close_matches(text, choices, n=3)


def integer(value: object) -> int | None:
    """Any integer type (Python's, numpy's) as `int`; None for other types and for booleans."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        return None
    return int(value)
