"""How hard a tuning job tries."""

from __future__ import annotations

from enum import StrEnum


class Effort(StrEnum):
    """How many candidates a tuning run may measure."""

    QUICK = "quick"  # a first good answer: about a dozen trials
    DEFAULT = "default"  # what the cost model thinks worth compiling and measuring
    EXHAUSTIVE = "exhaustive"  # every candidate of the curated (core) space
    RECHECK = "recheck"  # the winner and the few that came near it, in the finals only
