"""Invented candidates, for tests that need no real kernel."""

from __future__ import annotations

from gemmsmith.answers.answer import Correctness
from gemmsmith.core.candidate import Candidate
from gemmsmith.core.kernel import (
    Cutlass3xKernel,
    EpilogueSchedule,
    Kernel,
    MainloopSchedule,
    TileScheduler,
)
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import DType, Layout, Problem
from tests.support.replacing import replace
from tuner.backends.cutlass.operation import kernel

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


def several(count: int, dtype: DType = DType.BF16) -> list[Kernel]:
    """Kernels of one family; most of them are none of the space."""
    return [
        kernel(
            operation=Operation.of(dtype, Layout.TN),
            tile=(64, 16 * (1 + i % 16), 64),
            cluster=(1 + i // 16 % 4, 1),
            stages=i // 64,
            mainloop=MainloopSchedule.PINGPONG,
            epilogue=EpilogueSchedule.TMA,
            scheduler=TileScheduler.PERSISTENT,
            alignment=8,
        )
        for i in range(count)
    ]


def named(name: str, scheduler: TileScheduler = TileScheduler.PERSISTENT) -> Candidate:
    return Candidate(kernel=replace(KERNEL, name=name, scheduler=scheduler))
