"""The arithmetic of regrets, flips and neighbours on small recordings."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemmsmith.core.problem import Problem
from gemmsmith.core.tuning import Effort
from tests.support.recordings import best_of, record, some_candidates
from tests.support.replacing import replace
from tuner.devices.recording import Sweep
from tuner.search.budget import BUDGETS
from tuner.search.evaluation import (
    Curve,
    Recording,
    curve,
    flips,
    neighbours,
    planned,
    shuffled,
)
from tuner.search.matmul_heuristics import (
    HeuristicsUnavailable,
    MatmulHeuristics,
    TileProposal,
    matched,
)

PROBLEM = Problem(m=256, n=4096, k=4096)
NEAR = replace(PROBLEM, k=8192)
FAR = replace(PROBLEM, m=8192)
BUDGET = BUDGETS[Effort.DEFAULT]


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    return Sweep.load(record(tmp_path, PROBLEM, NEAR, FAR))


@pytest.fixture
def recording(sweep: Sweep) -> Recording:
    return Recording(sweep, sweep.problems[PROBLEM])


def test_regret_is_the_share_that_the_winner_takes_longer(recording: Recording) -> None:
    assert recording.winner == best_of(PROBLEM)
    assert recording.regret(recording.optimum) == 0
    fourth = some_candidates(PROBLEM)[3]
    assert recording.regret(fourth.key) == pytest.approx(3 / 16)


def test_the_winner_found_is_the_best_that_was_tried(recording: Recording) -> None:
    candidates = some_candidates(PROBLEM)
    assert recording.winner_of(candidates[:1], BUDGET) is None  # it failed
    assert recording.winner_of(candidates[:2], BUDGET) == candidates[1].key
    assert recording.winner_of(candidates[3:], BUDGET) == candidates[3].key
    assert recording.winner_of(candidates, BUDGET) == best_of(PROBLEM).key


def test_a_curve_falls_to_the_optimum(recording: Recording) -> None:
    backwards = lambda _: [recording.candidates[::-1]]  # noqa: E731
    made = curve("reversed", backwards, [recording], BUDGET, (1, 4, 8))
    (regrets,) = made.regrets.values()
    assert list(regrets) == sorted(regrets, reverse=True)
    assert regrets[-1] == 0
    assert regrets[0] > 0.5
    assert (made.trials, made.kernels) == (8, 8)


def test_before_anything_ran_the_regret_is_that_of_the_slowest(recording: Recording) -> None:
    failing = lambda _: [some_candidates(PROBLEM)[:1]]  # noqa: E731
    made = curve("failing", failing, [recording], BUDGET, (1,))
    slowest = max(recording.regret(key) for key in recording.times)
    assert made.worst == (slowest,)


def test_a_run_is_followed_step_by_step(recording: Recording) -> None:
    few = replace(BUDGET, waves=(2, 1), trials=3)
    made = curve("planned", planned(few), [recording], few)
    assert (made.trials, made.kernels) == (3, 3)
    whole = curve("planned", planned(BUDGET), [recording], BUDGET)
    assert whole.worst[-1] == 0


def test_random_orders_are_always_the_same(recording: Recording) -> None:
    strategy = shuffled(5)
    orders = strategy(recording)
    assert strategy(recording) == orders
    assert len({tuple(c.key for c in order) for order in orders}) == 5
    mean = curve("random", strategy, [recording], BUDGET, (2,)).medians[0]
    each = [curve("", lambda _, o=o: [o], [recording], BUDGET, (2,)).medians[0] for o in orders]  # type: ignore[misc]
    assert mean == pytest.approx(sum(each) / 5)


def test_medians_and_worsts_are_over_problems() -> None:
    rows = {PROBLEM: (0.3, 0.0), NEAR: (0.1, 0.0), FAR: (0.2, 0.1)}
    made = Curve(name="", counts=(1, 2), regrets=rows, trials=2, kernels=2)
    assert made.medians == (0.2, 0.0)
    assert made.worst == (0.3, 0.1)


def test_halves_that_agree_do_not_flip(recording: Recording) -> None:
    assert flips([recording]).rate == 0


def test_halves_that_disagree_flip_and_the_true_difference_is_told(sweep: Sweep) -> None:
    recorded = sweep.problems[PROBLEM]
    best, other = (
        next(t for t in recorded.trials if t.candidate == c) for c in some_candidates(PROBLEM)[2:4]
    )
    trials = (
        replace(best, further_us=tuple(10.0 + i % 2 for i in range(24))),  # slower in odd rounds
        replace(other, further_us=(10.5,) * 24),
    )
    flipped = flips([Recording(sweep, replace(recorded, trials=trials))])
    assert flipped.rate == 1
    assert 0 <= flipped.differences[PROBLEM] < 0.06


def test_the_nearest_problems_winner_answers(sweep: Sweep) -> None:
    recordings = [Recording(sweep, each) for each in sweep.problems.values()]
    near = neighbours(recordings, max_distance=2.0)
    assert [(each.problem, each.neighbour, each.distance) for each in near] == [
        (PROBLEM, NEAR, 1.0),
        (NEAR, PROBLEM, 1.0),
        (FAR, None, None),
    ]
    assert near[0].regret == recordings[0].regret(recordings[1].optimum)


def test_a_recording_without_times_is_an_error(sweep: Sweep) -> None:
    recorded = sweep.problems[PROBLEM]
    with pytest.raises(ValueError, match="nothing was measured"):
        Recording(sweep, replace(recorded, trials=recorded.trials[:1]))


def test_proposals_are_matched_with_our_nearest_candidates(recording: Recording) -> None:
    wanted = recording.candidates[4]
    kernel = wanted.kernel
    tile, cluster = kernel.tile, kernel.cluster
    if kernel.swapped:
        tile, cluster = (tile[1], tile[0], tile[2]), (cluster[1], cluster[0])
    proposal = TileProposal(tile=tile, cluster=cluster, splits=wanted.launch.splits)
    order = matched([proposal, proposal], recording.candidates)
    assert len(order) == len({candidate.key for candidate in order}) == 2
    assert order[0].kernel.tile == kernel.tile


def test_an_unknown_gpu_or_a_missing_package_is_said(recording: Recording) -> None:
    with pytest.raises(HeuristicsUnavailable, match="nvMatmulHeuristics"):
        MatmulHeuristics(replace(recording.model, name="NVIDIA of another kind"))
