"""Compares what Nsight Compute counted of a kernel with what `tuner.explain` says of it."""

from __future__ import annotations

import pytest

from gemmsmith.core.kernel import CutlassKernel, MainloopSchedule, TileScheduler
from tuner.explain.grid import of_candidate
from tuner.explain.resources import REGISTERS, registers_fit, resources
from tuner.profiling.records import ProblemProfile

PERSISTENT = (MainloopSchedule.PINGPONG, MainloopSchedule.COOPERATIVE)
RESERVED = 1024
"""Bytes of each block's shared memory that CUDA keeps for itself."""
MOST_TOO_MUCH = 384
"""Bytes of shared memory by which ours may be above the kernel's."""
HALF_A_DIGIT = 0.006
"""ncu prints waves with two digits."""


def check_counters(profile: ProblemProfile) -> None:
    """Check thread blocks, waves, threads, shared memory and occupancy of a profile's candidate.

    Raises:
        AssertionError: they differ.
    """
    candidate, main = profile.candidate.candidate, profile.candidate.main
    assert candidate is not None
    kernel = candidate.kernel
    assert isinstance(kernel, CutlassKernel)
    grid = of_candidate(candidate, profile.problem, profile.device)
    ours = resources(kernel)
    assert grid is not None
    assert ours is not None
    assert main.registers is not None
    assert main.waves is not None
    assert main.shared_bytes is not None

    blocks = grid.tiles * grid.splits
    if kernel.mainloop in PERSISTENT and kernel.scheduler is not TileScheduler.GRID:
        at_once = grid.resident * grid.blocks_per_sm
        assert main.blocks <= at_once
        # CUTLASS fills the GPU with blocks of a stream-K scheduler, however few tiles there are.
        is_stream = kernel.scheduler is TileScheduler.STREAM_K
        blocks = main.blocks if is_stream else min(blocks, at_once)
    assert main.blocks == blocks
    assert ours.threads == main.threads
    assert 0 <= ours.shared_bytes + RESERVED - main.shared_bytes <= MOST_TOO_MUCH
    assert main.registers * main.threads <= REGISTERS
    fits = min(ours.blocks_per_sm, registers_fit(main.registers, main.threads))
    assert main.waves == pytest.approx(blocks / (profile.device.sm_count * fits), abs=HALF_A_DIGIT)
