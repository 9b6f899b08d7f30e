"""What is measured again when the software around a winner has changed: its top candidates.

A new driver or cuBLAS moves all times a little, and rarely the best kernel. So the winner and the
few that came near it meet cuBLAS in finals once more; nothing is searched for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gemmsmith.answers.history import Origin
from gemmsmith.core.candidate import Candidate
from gemmsmith.core.kernel import CublasLtKernel
from gemmsmith.core.problem import Problem
from tuner.store import Store
from tuner.trial import Phase, Trial


def top_candidates(
    store: Store, problem: Problem, device: str, offered: Sequence[Candidate], limit: int
) -> list[Candidate]:
    """At most `limit` of the candidates `offered`, most promising first.

    The current winner on the device model (a slug), what other sites have chosen, its ties, the
    finalists of earlier runs, then the best of the screened ones; what failed when it last ran is
    left out. Empty where there is no winner, or its own candidate is among those that are not
    offered or failed: then measuring again does not do, and only a search helps.
    """
    winner = store.winner(problem, device)
    if winner is None or winner.candidate is None:
        return []
    trials = [stored.trial for stored in store.trials(problem=problem, device=device)]
    last = {trial.candidate.key: trial for trial in trials}
    known = {candidate.key: candidate for candidate in offered}
    # A library's algorithms are not enumerated. Those of another version are refused when they run.
    elsewhere = [
        each.winner.candidate
        for each in store.revisions(problem, device)
        if each.origin is Origin.IMPORTED and each.winner.candidate is not None
    ]
    measured = [trial.candidate for trial in trials] + [winner.candidate, *elsewhere]
    known |= {each.key: each for each in measured if isinstance(each.kernel, CublasLtKernel)}
    finalists = _by_time(trial for trial in trials if trial.phase is Phase.FINAL)
    screened = _by_time(trial for trial in trials if trial.phase is Phase.SCREEN)
    others = [each.key for each in elsewhere]
    keys = dict.fromkeys((winner.candidate.key, *others, *winner.ties, *finalists, *screened))
    found = [known[key] for key in keys if key in known and (key not in last or last[key].measured)]
    return found[:limit] if winner.candidate in found else []


def _by_time(trials: Iterable[Trial]) -> list[str]:
    """Keys of the candidates that were measured, by their best time."""
    best: dict[str, float] = {}
    for trial in trials:
        if trial.statistics is not None:
            key, time = trial.candidate.key, trial.statistics.median_us
            best[key] = min(time, best.get(key, time))
    return sorted(best, key=lambda key: (best[key], key))
