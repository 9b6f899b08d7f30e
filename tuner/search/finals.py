"""The finals of a run: the best few of the screening against each other and cuBLAS."""

from __future__ import annotations

from collections.abc import Sequence

from gemmsmith.problem import Problem
from tuner.devices.base import Contender, Device, Policy
from tuner.trial import Finals


def hold_finals(
    device: Device, problem: Problem, contenders: Sequence[Contender], policy: Policy
) -> Finals:
    """Paired rounds of `contenders`, given fastest first.

    A recording holds the rounds of finals only of those that were its best in screening, and
    serves the few common rounds as soon as one contender has no others. So the slowest leave until
    all that are left have theirs: of 256×4096×14336 in BF16 the common rounds name a kernel that is
    slower by 16% once the GPU is at its power limit (NVIDIA H200, 2026-11-21).

    Raises:
        DeviceError: the device cannot take the problem at all.
    """
    held = finals = device.finals(problem, contenders, policy)
    while device.replayed and len(contenders) > 1 and _rounds(held) < policy.final_rounds:
        contenders = contenders[:-1]
        held = device.finals(problem, contenders, policy)
    return held if _rounds(held) > _rounds(finals) else finals


def _rounds(finals: Finals) -> int:
    return min((len(samples) for samples in finals.samples_us), default=0)
