"""Ampere for data centres: A100, A30."""

from __future__ import annotations

from typing import Final

from tuner.arch.architecture import Architecture

SM80: Final = Architecture(
    name="sm80",
    gpus="A100, A30",
    target="80",
    measured=False,
    shared_bytes=163 << 10,
    reads_fp8=False,
    flops_per_clock=2048,
    typical_sm_count=108,  # of an A100
    l2_bytes=40 << 20,
)
