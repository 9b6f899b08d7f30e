"""How far the best candidate of a problem is from its floor, and what the distance is made of.

The floor is the roofline at the highest rates on record. Times are those of the sustained regime,
because only there the clock was recorded, from which the least that the power limit costs follows.
The causes are the parts of `tuner.explain.breakdown`, so they are estimates. What they do not
explain may be negative: then the estimate is too large.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from gemmsmith.answers.answer import Regime
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.problem import Problem
from tuner.explain.breakdown import Kernels, TimePart, breakdown
from tuner.explain.grid import of_candidate
from tuner.explain.roofline import roofline_of
from tuner.trial import Winner


class Cause(StrEnum):
    """Why a candidate takes longer than the floor."""

    QUANTIZATION = "quantization"  # tiles beyond the problem, and SMs without a tile
    START = "start"  # of the kernel and its pipeline: what a short K does not hide
    REDUCTION = "reduction"  # sums of tiles that are split along K
    EPILOGUE = "epilogue"  # stores that no products hide
    L2 = "L2"  # operands that are read again
    POWER = "power"  # at least: a clock too low for the highest rate
    UNEXPLAINED = "unexplained"


_PARTS = {
    Cause.QUANTIZATION: (TimePart.PADDING, TimePart.WAVES),
    Cause.START: (TimePart.LAUNCH,),
    Cause.REDUCTION: (TimePart.SPLIT,),
    Cause.EPILOGUE: (TimePart.EPILOGUE,),
    Cause.L2: (TimePart.L2,),
    Cause.POWER: (TimePart.POWER,),
    Cause.UNEXPLAINED: (TimePart.REST,),
}
BY_HAND = (Cause.REDUCTION, Cause.EPILOGUE, Cause.L2, Cause.UNEXPLAINED)
"""What another kernel could avoid. It has the same tiles to choose from, starts as late, and runs
at the same power limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Headroom:
    """The distance of a problem's best candidate to the floor.

    Attributes:
        tile: of the output, along M and N; None for cuBLASLt's algorithms, which name no tile.
        time_us: of the candidate.
        default_us: of the default; None if it was not timed.
        floor_us: the roofline's least time.
        causes: microseconds of each cause. Their sum is the distance.
    """

    problem: Problem
    device: DeviceModel
    tile: tuple[int, int] | None
    time_us: float
    default_us: float | None
    floor_us: float
    causes: Mapping[Cause, float]

    @property
    def distance_us(self) -> float:
        return self.time_us - self.floor_us

    @property
    def by_hand_us(self) -> float:
        """What a kernel by hand could save at most, against the faster of candidate and default."""
        behind = max(0.0, self.time_us - (self.default_us or self.time_us))
        return max(0.0, sum(self.causes[cause] for cause in BY_HAND) - behind)

    @property
    def by_hand_share(self) -> float:
        """The same, of the time of the faster of candidate and default."""
        return self.by_hand_us / min(self.time_us, self.default_us or self.time_us)


def headroom(winner: Winner) -> Headroom | None:
    """The headroom of a winner's candidate.

    Returns None without a candidate, a time in the sustained regime, or limits of the device.
    """
    problem, candidate = winner.problem, winner.candidate
    times = _sustained(winner)
    roofline = roofline_of(problem, winner.device, Regime.SUSTAINED)
    if candidate is None or times is None or roofline is None:
        return None
    time_us, default_us = times
    grid = of_candidate(candidate, problem, winner.device)
    parts = breakdown(
        problem,
        roofline.raised(problem, min(time_us, default_us or time_us)),
        time_us,
        grid,
        candidate=candidate,
        kernels=Kernels(),
        clock_mhz=winner.conditions.sm_clock_mhz if winner.conditions else 0.0,
    )
    return Headroom(
        problem=problem,
        device=winner.device,
        tile=grid.tile[:2] if grid else None,
        time_us=time_us,
        default_us=default_us,
        floor_us=parts[TimePart.FLOOR],
        causes={
            cause: sum(parts.get(part, 0.0) for part in those) for cause, those in _PARTS.items()
        },
    )


def _sustained(winner: Winner) -> tuple[float, float | None] | None:
    """The candidate's and the default's time in the sustained regime."""
    for item in winner.regimes:
        if item.regime is Regime.SUSTAINED:
            return item.median_us, item.default_us
    if winner.regimes or winner.statistics is None:
        return None
    default = winner.baseline  # the only regime before gemmsmith 0.2
    return winner.statistics.median_us, default.median_us if default else None
