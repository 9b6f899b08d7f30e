"""What people pass: values that are one of a fixed few, and integers of any library."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from numbers import Integral
from typing import TypeVar

from gemmsmith.errors import InvalidProblem

_E = TypeVar("_E", bound=StrEnum)

NAMED = 10
"""Longest list of choices that a message names in full if a few of them resemble the value."""

LONGEST_NAME = 100
"""Length of a text that may be a misspelt name. To compare megabytes would take seconds."""


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
    """The error for a value that is not one of a fixed few.

    The message names all choices if they are few or if none resembles the value, and else how many
    there are and those that do.
    """
    names = list(map(str, choices))
    text = str(value)
    shown = text if isinstance(value, StrEnum) else repr(value)
    meant = suggestion(text, names)
    listed = f"{len(names)} names" if meant and len(names) > NAMED else ", ".join(names)
    return InvalidProblem(field, f"{field} must be one of {listed}{what}, got {shown}{meant}")


def suggestion(text: str, choices: Iterable[str]) -> str:
    """`; did you mean a, b or c?`, of the choices that resemble a text; empty if none does."""
    from difflib import get_close_matches  # only a misspelt name needs it

    if len(text) > LONGEST_NAME:
        return ""
    *others, last = get_close_matches(text.lower(), list(choices), n=3) or [""]
    return f"; did you mean {', '.join(others)}{' or ' if others else ''}{last}?" if last else ""


def integer(value: object) -> int | None:
    """The integer as Python's own, numpy's too; None for what is none, as booleans are."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        return None
    return int(value)
