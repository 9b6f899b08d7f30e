"""The finals of a run: the best few of the screening against each other and cuBLAS."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import ceil

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.problem import Problem
from tuner.devices.base import Contender, Device
from tuner.measure.policy import Policy
from tuner.trial import Finals


def finalists(candidates: Sequence[Candidate], places: int) -> list[Candidate]:
    """The best `places` of `candidates`, which come fastest first; one tile takes half at most.

    Screening is short and cool, finals run at the power limit, and a tile that wins the one may
    lose the other: of 1536×1536×8192 in BF16 eight variants of 128×160 led the screening, and lost
    by 9% to what 128×144 makes of all SMs (NVIDIA H200, 2026-11-21).
    """
    most = ceil(places / 2)
    taken: Counter[object] = Counter()
    within: list[Candidate] = []
    beyond: list[Candidate] = []
    for candidate in candidates:
        tile = candidate.kernel.choices[:2]
        taken[tile] += 1
        (within if taken[tile] <= most else beyond).append(candidate)
    chosen = {candidate.key for candidate in [*within, *beyond][:places]}
    return [candidate for candidate in candidates if candidate.key in chosen]


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
