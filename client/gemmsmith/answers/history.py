"""A problem's winners, past and present."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from gemmsmith.answers.answer import Answer


class Origin(StrEnum):
    """Where a winner's measurements come from."""

    MEASURED = "measured"  # by this installation
    IMPORTED = "imported"  # by another one that is trusted, on a real GPU: shipped winners
    UNSIGNED = "unsigned"  # by another one, from a file without a trusted signature
    REPLAYED = "replayed"  # on a recorded GPU


@dataclass(frozen=True, kw_only=True, slots=True)
class Revision:
    """A winner in the history of its problem.

    Attributes:
        answer: what is, was or would be answered while it is served; `answer.revision` is its
            number, `answer.pinned` and `answer.stale` are as of now.
        current: it is the one that is served.
    """

    answer: Answer
    origin: Origin
    current: bool
