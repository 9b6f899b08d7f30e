"""Invented candidates, for tests that need no real kernel."""

from __future__ import annotations

from gemmsmith.answers.answer import Correctness
from gemmsmith.core.candidate import Candidate
from gemmsmith.core.kernel import (
    Cutlass3xKernel,
    EpilogueSchedule,
    MainloopSchedule,
    TileScheduler,
)
from gemmsmith.core.problem import DType, Layout, Problem
from tests.support.replacing import replace

PROBLEM = Problem(m=64, n=64, k=64)
KERNEL = Cutlass3xKernel(
    name="persistent",
    arch="sm90",
    dtype=DType.BF16,
    layout=Layout.TN,
    alignment_a=8,
    alignment_b=8,
    alignment_d=8,
    tile=(64, 64, 64),
    cluster=(1, 1),
    stages=0,
    mainloop=MainloopSchedule.PINGPONG,
    epilogue=EpilogueSchedule.TMA,
    scheduler=TileScheduler.PERSISTENT,
)
EXACT = Correctness(error=0.0, max_error=0.0, tolerance=1.0, repeatable=True)


def named(name: str, scheduler: TileScheduler = TileScheduler.PERSISTENT) -> Candidate:
    return Candidate(kernel=replace(KERNEL, name=name, scheduler=scheduler))
