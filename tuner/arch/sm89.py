"""Ada: L40S, L4, RTX 40."""

from __future__ import annotations

from typing import Final

from tuner.arch.architecture import Architecture

SM89: Final = Architecture(
    name="sm89",
    gpus="L40S, L4, RTX 40",
    target="89",
    measured=False,
    shared_bytes=99 << 10,
    flops_per_clock=1024,
    typical_sm_count=142,  # of an L40S
    l2_bytes=96 << 20,
)
