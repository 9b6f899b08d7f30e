"""The finals of a run: which candidates take part, and how the rounds are held.

A run's finalists are the best few of its screening. A re-check's are the winner and the candidates
that came near it: a new driver or cuBLAS changes all times a little, but rarely the best kernel,
so nothing is searched for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import ceil

from gemmsmith.answers.history import Origin
from gemmsmith.core.candidate import Candidate
from gemmsmith.core.kernel import CublasLtKernel
from gemmsmith.core.problem import Problem
from tuner.devices.base import Contender, Device
from tuner.measure.policy import Policy
from tuner.store import Store
from tuner.trial import Finals, Phase, Trial


def finalists(candidates: Sequence[Candidate], places: int) -> list[Candidate]:
    """The best `places` of `candidates`, which come fastest first; one tile takes half at most.

    Screening is short and cool, finals run at the power limit, and a tile that wins the first may
    lose the second: of 1536×1536×8192 in BF16 eight variants of 128×160 led the screening, and
    lost by 9% to what 128×144 makes of all SMs (NVIDIA H200, 2026-11-21).
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


def top_candidates(
    store: Store, problem: Problem, device: str, offered: Sequence[Candidate], limit: int
) -> list[Candidate]:
    """The finalists of a re-check: at most `limit` of the candidates `offered`, best first.

    The current winner on the device model (a slug), what other sites have chosen, its ties, the
    finalists of earlier runs, then the best of the screened candidates; those that failed when
    they last ran are left out. Empty if there is no winner, or its own candidate failed or is not
    offered: then measuring again is not enough, and only a search helps.
    """
    winner = store.winner(problem, device)
    if winner is None or winner.candidate is None:
        return []
    trials = [stored.trial for stored in store.trials(problem=problem, device=device)]
    latest = {trial.candidate.key: trial for trial in trials}
    known = {candidate.key: candidate for candidate in offered}
    # A library's algorithms are not enumerated. Those of another version are refused when they run.
    imported = [
        revision.winner.candidate
        for revision in store.revisions(problem, device)
        if revision.origin is Origin.IMPORTED and revision.winner.candidate is not None
    ]
    measured = [trial.candidate for trial in trials] + [winner.candidate, *imported]
    known |= {
        candidate.key: candidate
        for candidate in measured
        if isinstance(candidate.kernel, CublasLtKernel)
    }
    keys = dict.fromkeys((
        winner.candidate.key,
        *(candidate.key for candidate in imported),
        *winner.ties,
        *_by_time(trial for trial in trials if trial.phase is Phase.FINAL),
        *_by_time(trial for trial in trials if trial.phase is Phase.SCREEN),
    ))  # fmt: skip
    chosen = [
        known[key] for key in keys if key in known and (key not in latest or latest[key].measured)
    ]
    return chosen[:limit] if winner.candidate in chosen else []


def hold_finals(
    device: Device, problem: Problem, contenders: Sequence[Contender], policy: Policy
) -> Finals:
    """Paired rounds of `contenders`, which come fastest first.

    A recording holds the rounds of finals only of the candidates that were its best in screening,
    and gives the few common rounds as soon as one contender has no others. So the slowest leave
    until all that are left have theirs: of 256×4096×14336 in BF16 the common rounds name a kernel
    that is slower by 16% once the GPU is at its power limit (NVIDIA H200, 2026-11-21).

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


def _by_time(trials: Iterable[Trial]) -> list[str]:
    """Keys of the candidates that were measured, by their best time."""
    best: dict[str, float] = {}
    for trial in trials:
        if trial.statistics is not None:
            key, time = trial.candidate.key, trial.statistics.median_us
            best[key] = min(time, best.get(key, time))
    return sorted(best, key=lambda key: (best[key], key))
