"""How much each effort may compile and measure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gemmsmith.core.tuning import Effort
from tuner.backends import Level
from tuner.measure.policy import Policy


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Bounds of one tuning run.

    Attributes:
        waves: distinct kernels measured in one go, a number for each wave.
        cold: kernels compiled, side by side, if too few kernels are built for an answer.
        further: kernels compiled in a second go, after a first winner among the built kernels.
        trials: candidates screened in all, each kernel's first launch included, without finals.
        batch: launches screened before choosing again which kernels get more of them.
        seeds: winners of near problems that lead the first wave.
        hints: kernels like the default's that follow them.
        library: algorithms of a library's own list that are screened.
        variants: further algorithms, near the best of those, in all.
        finalists: candidates that meet the default in the finals.
        level: how wide a space the candidates come from.
    """

    waves: tuple[int, ...]
    cold: int
    further: int
    trials: int
    batch: int
    seeds: int
    hints: int
    library: int
    variants: int
    finalists: int
    level: Level
    policy: Policy

    @property
    def kernels(self) -> int:
        return sum(self.waves)

    def in_one_wave(self, kernels: int | None = None) -> Budget:
        """The same bounds, with all kernels at once, or with so many of them."""
        return replace(self, waves=(self.kernels if kernels is None else kernels,))


_EVERYTHING = 1_000_000

# The bounds are what `gemmsmith eval` showed to suffice on the recorded sweeps of an NVIDIA H200
# (34 problems, 2026-11-21): see its table for the regret that each number of trials leaves. One
# wave of 16 kernels is worth what three waves are; one of 12 too, at the median (0.0%) and at the
# worst (2.7%); one of 10 is not (15.9%). So 12 are compiled if the caller waits for all of them.
BUDGETS = {
    Effort.QUICK: Budget(
        waves=(8, 2),
        cold=10,
        further=0,
        trials=12,
        batch=4,
        seeds=2,
        hints=1,
        library=8,
        variants=0,
        finalists=3,
        level=Level.CORE,
        policy=Policy(screen_samples=3, final_rounds=15),
    ),
    Effort.DEFAULT: Budget(
        waves=(8, 4, 4),
        cold=12,
        further=8,
        trials=48,
        batch=8,
        seeds=4,
        hints=2,
        library=16,
        variants=48,
        finalists=8,
        level=Level.CORE,
        policy=Policy(screen_samples=5, final_rounds=25),
    ),
    Effort.EXHAUSTIVE: Budget(
        waves=(_EVERYTHING,),
        cold=_EVERYTHING,
        further=_EVERYTHING,
        trials=_EVERYTHING,
        batch=_EVERYTHING,
        seeds=0,
        hints=0,
        library=128,
        variants=512,
        finalists=12,
        level=Level.CORE,
        policy=Policy(screen_samples=5, final_rounds=40),
    ),
}
BUDGETS[Effort.RECHECK] = BUDGETS[Effort.DEFAULT]  # for its finals, and where those cannot be held
