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
        waves: distinct kernels measured in one go, one figure a wave.
        cold: kernels compiled, side by side, where nothing worth an answer is built.
        further: kernels compiled after a first winner was found among those built already.
        trials: candidates screened in all, each kernel's first launch included; finals apart.
        batch: launches screened before looking again which kernels are worth more of them.
        seeds: winners of near problems that lead the first wave.
        hints: kernels like cuBLAS's that follow them.
        library: algorithms of a library's own list that are screened.
        variants: further ones of it, near the best of those, in all.
        finalists: candidates that meet cuBLAS in the finals.
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
        """Distinct kernels that may be compiled and measured."""
        return sum(self.waves)

    def in_one_wave(self, kernels: int | None = None) -> Budget:
        """The same bounds, with all kernels, or so many of them, at once."""
        return replace(self, waves=(self.kernels if kernels is None else kernels,))


_EVERYTHING = 1_000_000

# The bounds are what `gemmsmith eval` showed to suffice on the recorded sweeps of an NVIDIA H200
# (34 problems, 2026-11-21): see its table for the regret that each number of trials leaves. One
# wave of 16 kernels is worth what three waves are; one of 12 too, at the median (0.0%) and at the
# worst (2.7%); one of 10 is not (15.9%). So 12 are compiled where somebody waits for every one.
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
