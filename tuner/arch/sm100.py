"""Blackwell for data centres: B200, GB200."""

from __future__ import annotations

from typing import Final

from tuner.arch.architecture import Architecture

SM100: Final = Architecture(
    name="sm100",
    gpus="B200, GB200",
    # tcgen05 exists only in the architecture-specific target.
    target="100a",
    measured=False,
    # The adapters launch TMA kernels so that they overlap the grid before them. Without this flag
    # CUTLASS leaves out the instruction that waits for that grid's results.
    compiler_flags=("-DCUTLASS_ENABLE_GDC_FOR_SM100",),
    shared_bytes=227 << 10,
    max_cluster=8,
    max_cluster_side=4,
    sms_per_gpc=20,  # `PersistentTileSchedulerSm100Params`
    flops_per_clock=8192,
    typical_sm_count=148,  # of a B200
    l2_bytes=126 << 20,
)
