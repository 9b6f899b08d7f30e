"""How much each effort may compile and measure."""

from __future__ import annotations

from dataclasses import dataclass

from gemmsmith.tuning import Effort
from tuner.devices.base import Policy
from tuner.space import Level


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Bounds of one tuning run.

    Attributes:
        kernels: distinct kernels that may be compiled and measured.
        refine: best kernels whose other launches are then explored.
        launches: launches of one refined kernel that are measured.
        finalists: candidates that meet cuBLAS in the finals.
        level: how wide a space the candidates come from.
    """

    kernels: int
    refine: int
    launches: int
    finalists: int
    level: Level
    policy: Policy


_EVERYTHING = 1_000_000

BUDGETS = {
    Effort.QUICK: Budget(
        kernels=8,
        refine=1,
        launches=4,
        finalists=3,
        level=Level.CORE,
        policy=Policy(screen_samples=3, final_rounds=15),
    ),
    # 64 kernels: on 16 cores one wave of 16 units of four, about a minute of compilation
    # (cold 80 s, warm 6 s, both with start-up: 4096×6144×4096 bf16, NVIDIA H200, 2026-11-21).
    Effort.DEFAULT: Budget(
        kernels=64,
        refine=16,
        launches=12,
        finalists=8,
        level=Level.CORE,
        policy=Policy(screen_samples=5, final_rounds=25),
    ),
    Effort.EXHAUSTIVE: Budget(
        kernels=_EVERYTHING,
        refine=_EVERYTHING,
        launches=_EVERYTHING,
        finalists=12,
        level=Level.CORE,
        policy=Policy(screen_samples=5, final_rounds=40),
    ),
}
