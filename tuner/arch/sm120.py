"""Blackwell for workstations: RTX PRO 6000, RTX 50."""

from __future__ import annotations

from typing import Final

from tuner.arch.architecture import Architecture

SM120: Final = Architecture(
    name="sm120",
    gpus="RTX PRO 6000, RTX 50",
    target="120a",
    measured=False,
    shared_bytes=99 << 10,
    flops_per_clock=1024,
    typical_sm_count=188,  # of an RTX PRO 6000
    l2_bytes=128 << 20,
)
