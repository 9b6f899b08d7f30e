"""What a tuning run reports while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class Step(StrEnum):
    """The steps of a tuning run, in order."""

    ENUMERATE = "enumerate"  # candidates listed and ranked
    COMPILE = "compile"  # kernels being built; measured ones overlap with it
    SCREEN = "screen"  # candidates verified and timed briefly
    FINALS = "finals"  # the best few against each other and the default
    PROMOTE = "promote"  # the winner is stored


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """One report. `done` of `total` counts candidates, except while compiling: kernels.

    Attributes:
        best_us: microseconds per launch of the best so far: the fastest of the screening, and
            after the finals their winner, or the default if it stays.
        best: its key, or the default's name.
        recorded: name of the GPU model whose recorded times these are; empty if a GPU measures.
        message: one plain line for a log.
    """

    phase: Step
    done: int
    total: int
    best_us: float | None = None
    best: str | None = None
    recorded: str = ""
    message: str = ""


Listener = Callable[[Progress], None]
