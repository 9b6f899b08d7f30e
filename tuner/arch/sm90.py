"""Hopper: H100, H200, H20."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from tuner.arch.architecture import Architecture

_RESIDENT = {
    132: {4: 120, 6: 102, 8: 120, 10: 70, 12: 84, 14: 98, 16: 112},
}
"""Thread blocks that run at once, by SM count and cluster size, from
`cudaOccupancyMaxActiveClusters` on one NVIDIA H200 (2026-11-21). GPCs differ from one GPU to the
next, so this is an estimate even for other H200s; a launch queries its own device."""

SM90: Final = Architecture(
    name="sm90",
    gpus="H100, H200, H20",
    # wgmma and TMA exist only in the architecture-specific target.
    target="90a",
    measured=True,
    compiler_flags=(
        # Without it, tiles whose N is not in CUTLASS's short list run as N=16 instructions:
        # 30% slower for 128×144 on 4096×576×7168 (H200, 2026-11-20).
        "-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED",
        # Programmatic dependent launch: a launch's prologue overlaps the tail of the one before it.
        # 1.5 to 9% on products of 8 to 20 µs (NVIDIA H200, 2026-11-21; docs/findings.md).
        "-DCUTLASS_ENABLE_GDC_FOR_SM90",
    ),
    shared_bytes=232448,  # 227 KiB (`sm90_smem_capacity_bytes`)
    max_cluster=8,  # more needs an opt-in, and fewer of them fit a GPC
    max_cluster_side=4,
    sms_per_gpc=18,  # of GH100
    resident=MappingProxyType(_RESIDENT),
    flops_per_clock=4096,
    typical_sm_count=132,  # of an H200
    l2_bytes=60 << 20,
)
