"""Winners of two GPUs of one model, compared."""

from __future__ import annotations

import pytest
from sqlalchemy import update

from gemmsmith.answers.answer import Ratio
from gemmsmith.core.config import Use
from gemmsmith.core.problem import Problem
from gemmsmith.core.tuning import Effort
from tests.support.records import imported
from tests.support.replacing import replace
from tests.support.serving import ENVIRONMENT, winner
from tuner.backends import kernels
from tuner.jobs import Queue
from tuner.jobs.rechecks import IDLE_PRIORITY
from tuner.merge import LATELY_S, NOISE, Verdict, compare, is_for_a_third, settle
from tuner.search.finals import top_candidates
from tuner.store import Store
from tuner.store.models import GpuRow
from tuner.trial import Winner

PROBLEM = Problem(m=256, n=1024, k=512)
OURS = winner(PROBLEM)
OTHER_GPU = replace(ENVIRONMENT, gpu_uuid="GPU-1")


def theirs(median: float, *, kernel: int = 0, use: Use = Use.CUTLASS) -> Winner:
    """What another GPU of the model found: an interval of 1% to each side."""
    changed = replace(
        OURS,
        environment=OTHER_GPU,
        use=use,
        speedup=Ratio(median=median, ci_low=median * 0.99, ci_high=median * 1.01),
    )
    candidate = changed.candidate
    assert candidate is not None
    return replace(changed, candidate=replace(candidate, kernel=kernels(PROBLEM)[kernel]))


def test_one_measurement_is_the_same_wherever_it_is() -> None:
    known = replace(OURS, digest="d")
    assert compare(known, known) is Verdict.SAME


def test_the_same_choice_agrees_within_noise() -> None:
    assert compare(OURS, theirs(1.1)) is Verdict.AGREE
    assert compare(OURS, theirs(1.1 * (1 + NOISE))) is Verdict.AGREE


def test_winners_that_hold_on_one_gpu_each_are_ties() -> None:
    assert compare(OURS, theirs(1.11, kernel=1)) is Verdict.TIE
    even = replace(OURS, speedup=Ratio(median=1.01, ci_low=1.0, ci_high=1.02))
    assert compare(even, theirs(1.0, use=Use.CUBLAS)) is Verdict.TIE


@pytest.mark.parametrize("kernel", [0, 1])
def test_what_is_beyond_noise_is_in_dispute(kernel: int) -> None:
    assert compare(OURS, theirs(1.2, kernel=kernel)) is Verdict.DISAGREE
    assert compare(OURS, theirs(1.0, kernel=kernel)) is Verdict.DISAGREE
    assert compare(OURS, theirs(1.1, use=Use.CUBLAS)) is Verdict.DISAGREE


def test_other_software_and_recordings_are_not_compared() -> None:
    other = replace(theirs(1.5), environment=replace(OTHER_GPU, driver="999"))
    assert compare(OURS, other) is Verdict.APART
    assert compare(OURS, replace(theirs(1.5), replayed=True)) is Verdict.APART
    assert compare(OURS, replace(theirs(1.5), speedup=None)) is Verdict.APART


def test_a_dispute_is_measured_again_once(store: Store) -> None:
    store.promote(OURS)
    queue = Queue(store)
    unknown = replace(theirs(1.3), problem=replace(PROBLEM, m=512))
    verdicts, jobs = settle(store, queue, [theirs(1.3), unknown])
    assert dict(verdicts) == {Verdict.DISAGREE: 1}
    (job,) = jobs
    assert (job.problem, job.effort, job.device) == (PROBLEM, Effort.RECHECK, OURS.device.slug)
    assert job.priority == IDLE_PRIORITY
    _, again = settle(store, queue, [theirs(1.3)])
    assert [each.id for each in again] == [job.id]


def report(store: Store, gpu: str) -> None:
    store.gpus.report(OURS.device, replace(ENVIRONMENT, gpu_uuid=gpu))


def left(store: Store, gpu: str) -> bool:
    return is_for_a_third(store, PROBLEM, OURS.device.slug, gpu)


def test_a_dispute_is_for_a_gpu_that_is_no_party_to_it(store: Store) -> None:
    store.promote(OURS)
    report(store, "GPU-0")
    report(store, "GPU-2")
    imported(store, theirs(1.11, kernel=1))
    assert not left(store, "GPU-0"), "a tie is no dispute"
    imported(store, theirs(1.3, kernel=1))
    assert [left(store, f"GPU-{number}") for number in range(3)] == [True, True, False]
    with store.database.write() as session:
        long_ago = {"seen_at": GpuRow.seen_at - 2 * LATELY_S}
        session.execute(update(GpuRow).where(GpuRow.uuid == "GPU-2").values(long_ago))
    assert not left(store, "GPU-0"), "nobody else is there"


def test_what_nobody_believes_is_not_disputed(store: Store) -> None:
    store.promote(OURS)
    report(store, "GPU-2")
    imported(store, theirs(1.3, kernel=1), believed=False)
    assert not left(store, "GPU-0")


def test_both_choices_are_measured_again(store: Store) -> None:
    other = theirs(1.3, kernel=1)
    assert OURS.candidate is not None
    assert other.candidate is not None
    offered = [OURS.candidate, other.candidate]
    store.promote(OURS)
    assert top_candidates(store, PROBLEM, OURS.device.slug, offered, 8) == offered[:1]
    imported(store, other, believed=False)
    assert top_candidates(store, PROBLEM, OURS.device.slug, offered, 8) == offered[:1]
    imported(store, other)
    assert top_candidates(store, PROBLEM, OURS.device.slug, offered, 8) == offered
