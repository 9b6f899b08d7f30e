"""What a tuning run tells whoever watches it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Step(StrEnum):
    """The steps of a tuning run, in order."""

    ENUMERATE = "enumerate"  # candidates listed and ranked
    COMPILE = "compile"  # kernels being built; measured ones overlap with it
    SCREEN = "screen"  # candidates verified and timed briefly
    FINALS = "finals"  # the best few against each other and cuBLAS
    PROMOTE = "promote"  # the winner is stored


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """One report. `done` of `total` counts candidates, except while compiling: kernels.

    Attributes:
        best_us: microseconds per launch of what is ahead. Until finals were held, that is the
            fastest of the screening, which takes part in them; then what they decided for.
        best: its key; the default's name where the default stays.
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
