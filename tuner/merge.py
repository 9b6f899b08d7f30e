"""Comparing winners of two GPUs of one model: of two sites, or of two machines of one site.

No two GPUs are alike, and a median from one says little about another. So the paired speed-ups
over the default are compared, in which a GPU's clock cancels out, and only if both were measured
with the same software. Two different choices are a tie as long as neither speed-up is beyond the
other's noise. If one is, a third GPU, if there is one, measures both choices again; its result is
served.
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
"""How far two speed-ups may differ beyond their intervals. An assumption: the difference between
two GPUs of a model was not measured."""

LATELY_S = 7200.0
"""A GPU is in use if its last report is not older by more than the newest: GPUs report hourly."""

_DEFAULT = Ratio(median=1.0, ci_low=1.0, ci_high=1.0)


class Verdict(StrEnum):
    """The result of comparing two winners of one problem and device model."""

    SAME = "same"  # one measurement, known to both
    AGREE = "agree"  # the same choice, as fast as noise allows
    TIE = "tie"  # each holds on its own GPU, and neither is better beyond noise
    DISAGREE = "disagree"  # beyond noise: to be measured again
    APART = "apart"  # not comparable: other software, a recording, or no speed-up


def compare(ours: Winner, theirs: Winner) -> Verdict:
    """Compare two winners of one problem on one device model."""
    if ours.digest and ours.digest == theirs.digest:
        return Verdict.SAME
    if ours.replayed or theirs.replayed:
        return Verdict.APART
    if software(ours.environment) != software(theirs.environment):
        return Verdict.APART
    our_gain, their_gain = _gain(ours), _gain(theirs)
    if our_gain is None or their_gain is None:
        return Verdict.APART
    if _beyond(our_gain, their_gain) or _beyond(their_gain, our_gain):
        return Verdict.DISAGREE
    return Verdict.AGREE if _choice(ours) == _choice(theirs) else Verdict.TIE


def settle(
    store: Store, queue: Queue, theirs: Iterable[Winner]
) -> tuple[Counter[Verdict], list[Job]]:
    """Compare winners from elsewhere with those that are served here; re-check the disputed ones.

    A re-check is idle work for a GPU of the model other than the two that disagree, if there is one
    (`is_for_a_third`); a re-check that is waiting or running is joined. `theirs` must be trusted:
    otherwise any site could keep our GPUs busy.

    Returns:
        How often each verdict occurred, and the re-checks.

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
    """Whether a re-check must wait for another GPU: this one is one of those that disagree.

    `device` is the device model's slug, `gpu` the GPU's UUID.

    Raises:
        StoreError: the database cannot be used.
    """
    revisions = store.revisions(problem, device)
    served = next((revision.winner for revision in revisions if revision.current), None)
    if served is None:
        return False
    trusted = [rev.winner for rev in revisions if rev.origin is not Origin.UNSIGNED]
    against = [winner for winner in trusted if compare(served, winner) is Verdict.DISAGREE]
    parties = {winner.environment.gpu_uuid for winner in (served, *against)}
    if not against or gpu not in parties:
        return False
    gpus = [known for known in store.gpus.known() if known.device.slug == device]
    newest = max((known.seen_at for known in gpus), default=0.0)
    return any(known.uuid not in parties and known.seen_at > newest - LATELY_S for known in gpus)


def _gain(winner: Winner) -> Ratio | None:
    return _DEFAULT if winner.use.is_default else winner.speedup


def _beyond(higher: Ratio, lower: Ratio) -> bool:
    return higher.ci_low > lower.ci_high * (1 + NOISE)


def _choice(winner: Winner) -> str | None:
    return None if winner.runs is None else winner.runs.key
