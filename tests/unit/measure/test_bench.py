"""Which schedules claim to add in one order, so that the bench demands equal bits of two runs."""

from __future__ import annotations

import pytest

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.kernel import EpilogueSchedule, Kernel, MainloopSchedule, TileScheduler
from gemmsmith.core.launch import Decomposition, Launch
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import DType, Layout
from tuner.backends.cutlass.operation import kernel

COOPERATIVE = MainloopSchedule.COOPERATIVE
PLAIN = MainloopSchedule.WARP_SPECIALIZED


def _kernel(scheduler: TileScheduler, mainloop: MainloopSchedule = COOPERATIVE) -> Kernel:
    in_cluster = scheduler is TileScheduler.CLUSTER_SPLIT_K
    return kernel(
        operation=Operation.of(DType.BF16, Layout.TN),
        tile=(128, 128, 64),
        mainloop=mainloop,
        epilogue=EpilogueSchedule.NO_SMEM if in_cluster else EpilogueSchedule.TMA,
        scheduler=scheduler,
        alignment=8,
    )


@pytest.mark.parametrize(
    ("scheduler", "mainloop", "launch", "claims"),
    [
        (TileScheduler.PERSISTENT, COOPERATIVE, Launch(), True),
        (TileScheduler.GRID, PLAIN, Launch(), True),
        (TileScheduler.STREAM_K, COOPERATIVE, Launch(), True),
        *(
            (TileScheduler.STREAM_K, COOPERATIVE, launch, False)
            for launch in (
                Launch(decomposition=Decomposition.SPLIT_K, splits=4),
                Launch(decomposition=Decomposition.STREAM_K),
                Launch(decomposition=Decomposition.HEURISTIC),
            )
        ),
        # Ours add slices in their order, however many there are.
        *(
            (scheduler, mainloop, Launch(decomposition=Decomposition.SPLIT_K, splits=splits), True)
            for scheduler, mainloop in (
                (TileScheduler.SPLIT_K, COOPERATIVE),
                (TileScheduler.SPLIT_K, PLAIN),
                (TileScheduler.CLUSTER_SPLIT_K, PLAIN),
            )
            for splits in (2, 16)
        ),
        (TileScheduler.CLUSTER_SPLIT_K, PLAIN, Launch(), True),
    ],
)
def test_claims_of_a_fixed_order(
    scheduler: TileScheduler, mainloop: MainloopSchedule, launch: Launch, claims: bool
) -> None:
    candidate = Candidate(kernel=_kernel(scheduler, mainloop), launch=launch)
    assert candidate.has_fixed_order is claims
