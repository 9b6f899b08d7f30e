"""Winners of two GPUs of one model, compared: of two sites, or of two machines of one site.

No two GPUs are alike, and a median from one says little about another. What is compared is the
paired speed-up over the default, in which a GPU's clock cancels out, and only where both were
measured with the same software. A winner that holds on one GPU and not on the other is a tie, as
long as neither speed-up is beyond the other's noise. Where one is, a third GPU measures both
choices again, if there is one; what it finds is served.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import StrEnum

from gemmsmith.answers.answer import Ratio
from gemmsmith.answers.history import Origin
from gemmsmith.core.problem import Problem
from gemmsmith.core.tuning import Effort
from tuner.jobs.job import Job
from tuner.jobs.queue import Queue
from tuner.jobs.rechecks import IDLE_PRIORITY
from tuner.store import Store
from tuner.store.gpus import software
from tuner.trial import Winner

NOISE = 0.02
"""How far two speed-ups are allowed to be apart beside their intervals. An assumption: how far
two GPUs of a model differ was not measured."""

LATELY_S = 7200.0
"""A GPU that has reported so long before the newest report counts as there: it does so hourly."""

_DEFAULT = Ratio(median=1.0, ci_low=1.0, ci_high=1.0)


class Verdict(StrEnum):
    """What two winners of one problem and device model say of each other."""

    SAME = "same"  # one measurement, known to both
    AGREE = "agree"  # the same choice, as fast as noise allows
    TIE = "tie"  # each holds on its own GPU, and neither is better beyond noise
    DISAGREE = "disagree"  # beyond noise: to be measured again
    APART = "apart"  # other software, a recording, or no speed-up: nothing to compare


def compare(ours: Winner, theirs: Winner) -> Verdict:
    """Compare two winners of one problem on one device model."""
    if ours.digest and ours.digest == theirs.digest:
        return Verdict.SAME
    if ours.replayed or theirs.replayed:
        return Verdict.APART
    if software(ours.environment) != software(theirs.environment):
        return Verdict.APART
    mine, other = _gain(ours), _gain(theirs)
    if mine is None or other is None:
        return Verdict.APART
    if _beyond(mine, other) or _beyond(other, mine):
        return Verdict.DISAGREE
    return Verdict.AGREE if _choice(ours) == _choice(theirs) else Verdict.TIE


def settle(
    store: Store, queue: Queue, theirs: Iterable[Winner]
) -> tuple[Counter[Verdict], list[Job]]:
    """Compare winners from elsewhere with those that are served here; order what is in dispute.

    A re-check is idle work of any GPU of the model but the parties to the dispute, as long as there
    is another (`is_for_a_third`); one that is waiting or running is joined.
    `theirs` must be believed: whoever liked to could keep our GPUs busy.

    Returns:
        How often each verdict was given, and the re-checks.

    Raises:
        StoreError: the database cannot be used.
    """
    verdicts: Counter[Verdict] = Counter()
    jobs = []
    for winner in theirs:
        ours = store.winner(winner.problem, winner.device.slug)
        if ours is None:
            continue
        verdict = compare(ours, winner)
        verdicts[verdict] += 1
        if verdict is Verdict.DISAGREE:
            job, _ = queue.enqueue(
                winner.problem,
                effort=Effort.RECHECK,
                device=winner.device.slug,
                priority=IDLE_PRIORITY,
            )
            jobs.append(job)
    return verdicts, jobs


def is_for_a_third(store: Store, problem: Problem, device: str, gpu: str) -> bool:
    """Whether a GPU is party to a dispute about a problem that another one could settle.

    `device` is the device model's slug, `gpu` the GPU's UUID.

    Raises:
        StoreError: the database cannot be used.
    """
    revisions = store.revisions(problem, device)
    served = next((each.winner for each in revisions if each.current), None)
    if served is None:
        return False
    believed = [each.winner for each in revisions if each.origin is not Origin.UNSIGNED]
    against = [each for each in believed if compare(served, each) is Verdict.DISAGREE]
    parties = {each.environment.gpu_uuid for each in (served, *against)}
    if not against or gpu not in parties:
        return False
    there = [each for each in store.gpus.known() if each.device.slug == device]
    newest = max((each.seen_at for each in there), default=0.0)
    return any(each.uuid not in parties and each.seen_at > newest - LATELY_S for each in there)


def _gain(winner: Winner) -> Ratio | None:
    """How much faster than the default callers of the winner are."""
    return _DEFAULT if winner.use.is_default else winner.speedup


def _beyond(one: Ratio, other: Ratio) -> bool:
    return one.ci_low > other.ci_high * (1 + NOISE)


def _choice(winner: Winner) -> str | None:
    """What callers run: a candidate's key; None for the default."""
    return None if winner.runs is None else winner.runs.key
