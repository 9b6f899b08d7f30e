"""How much a device measures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Numbers of samples and rounds, and the limits of screening.

    Attributes:
        screen_samples: timed graph replays per candidate while screening.
        final_rounds: paired rounds in the finals.
        give_up_ratio: screening stops sampling a candidate whose best sample so far is this many
            times slower than the best median seen for the problem.
        candidate_timeout_s: wall time after which a candidate counts as hung.
    """

    screen_samples: int = 5
    final_rounds: int = 25
    give_up_ratio: float = 1.3
    candidate_timeout_s: float = 30.0
