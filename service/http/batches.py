"""The body of `POST /best:batch`: thousands of problems, read one by one in a thread.

All other bodies are small, and are checked and decoded as a whole (`service.http.bodies`). Of
this one, no single step takes long, whatever it contains: a decoder holds Python's lock, so that
the event loop would stand still with it. Cheap checks come first: the number of values, and the
length of each problem and of the rest. 10,000 problems take 30 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from gemmsmith.core.problem import Problem
from gemmsmith.errors import InvalidProblem
from service.errors import NO_OBJECT, ProblemError, invalid_field
from service.http.bodies import check_json, check_small, no_json, number_of_values
from service.http.questions import QuestionReader
from service.http.requests import MAX_BATCH_PROBLEMS, BestBatchBody, ProblemBody

_MOST_VALUES = 16 * MAX_BATCH_PROBLEMS
"""A problem has 13 fields."""

_LONGEST_PROBLEM = 2_000
_LONGEST_REST = 16 * 1024
"""Bytes of a problem, and of everything beside the problems, blanks excepted."""


class _Envelope(msgspec.Struct):
    problems: msgspec.Raw = msgspec.Raw()


_ENVELOPE = msgspec.json.Decoder(_Envelope)
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])
_OPTIONS = QuestionReader(BestBatchBody)
_PROBLEM = QuestionReader(ProblemBody)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """A body that was read.

    Attributes:
        problems: in order; in place of one that is invalid, what is wrong with it.
        options: the other members.
    """

    problems: Sequence[Problem | ProblemError]
    options: BestBatchBody


def read(content: bytes) -> Batch:
    """Read a body.

    Raises:
        ProblemError: 400, it is not JSON; 422, it is wrong as a whole, says a thing twice, or has
            unusable text in it.
    """
    if not content:
        raise invalid_field("body", NO_OBJECT)
    if number_of_values(content) > _MOST_VALUES:
        raise invalid_field("body", "has too many values", f"at most {_MOST_VALUES}")
    try:
        listed = bytes(_ENVELOPE.decode(content).problems)
        _check_rest(content.replace(listed, b"0", 1) if listed else content)
        members = _MEMBERS.decode(content)  # few, as the rest is small
        items = _ITEMS.decode(listed) if listed.startswith(b"[") else None
    except msgspec.ValidationError:
        raise invalid_field("body", NO_OBJECT) from None
    except RecursionError:
        raise no_json("it is nested too deeply") from None
    except ValueError as error:  # msgspec's are ValueErrors
        raise no_json(str(error)) from None
    return Batch(
        options=_options(members, None if items is None else len(items)),
        problems=[_problem(index, bytes(item)) for index, item in enumerate(items or ())],
    )


def _check_rest(rest: bytes) -> None:
    blanks = sum(map(rest.count, (b" ", b"\t", b"\r", b"\n")))
    if len(rest) - blanks > _LONGEST_REST:
        raise invalid_field(
            "body", "is too long without its problems", f"at most {_LONGEST_REST} bytes"
        )
    check_small(rest)


def _options(members: dict[str, msgspec.Raw], problems: int | None) -> BestBatchBody:
    """The members, with nothing of the problems but their number."""
    document = {
        name: msgspec.json.decode(raw) for name, raw in members.items() if name != "problems"
    }
    if "problems" in members:
        document["problems"] = None if problems is None else [None] * problems
    return _OPTIONS.document(document)


def _problem(index: int, content: bytes) -> Problem | ProblemError:
    if len(content) > _LONGEST_PROBLEM:
        return invalid_field("body", "is too long", f"at most {_LONGEST_PROBLEM} bytes")
    document = check_json(content, f"problems.{index}")
    try:
        return _PROBLEM.document(document).problem()
    except ProblemError as error:
        return error
    except InvalidProblem as error:
        return invalid_field(error.field, str(error))
