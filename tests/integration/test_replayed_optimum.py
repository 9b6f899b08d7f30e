"""Tuning against the recorded H200 finds what an exhaustive look at the recording finds.

The targets are those of the efforts: how much longer than the recorded optimum the winner may take,
and in how many trials and kernels it must be found.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

import pytest

from gemmsmith.core.problem import Problem
from gemmsmith.core.tuning import Effort
from tests.support.shipped import SWEEPS
from tuner.devices import open_device
from tuner.devices.recording import SUFFIX, RecordedProblem, Sweep
from tuner.measure.statistics import paired_ratio, summarize
from tuner.search.budget import BUDGETS
from tuner.search.evaluation import Recording, curve, planned
from tuner.search.run import TuningRun
from tuner.store import Store
from tuner.trial import Phase, Winner


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What a run found, and in how much work."""

    winner: Winner
    trials: int
    kernels: int
    regret: float


@cache
def sweeps() -> list[Sweep]:
    return [Sweep.load(path) for path in sorted(SWEEPS.glob(f"*{SUFFIX}"))]


@cache
def recorded() -> dict[Problem, RecordedProblem]:
    return {problem: each for sweep in sweeps() for problem, each in sweep.problems.items()}


@pytest.fixture(scope="module")
def default(
    sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[Problem, Tuned]:
    return tuned(Effort.DEFAULT, sqlite_template, tmp_path_factory.mktemp("default"))


@pytest.fixture(scope="module")
def quick(sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Problem, Tuned]:
    return tuned(Effort.QUICK, sqlite_template, tmp_path_factory.mktemp("quick"))


def tuned(effort: Effort, empty: Path, folder: Path) -> dict[Problem, Tuned]:
    """Every recorded problem, each from a copy of an empty database: no winner of another helps."""
    found = {}
    with open_device("replay:", sweeps=SWEEPS) as device:
        for i, (problem, measured) in enumerate(recorded().items()):
            with Store.open(f"sqlite:///{shutil.copy(empty, folder / f'{i}.db')}") as store:
                winner = TuningRun(
                    problem=problem,
                    device=device,
                    store=store,
                    builder=None,
                    effort=effort,
                ).tune()
                trials = store.trials(phase=Phase.SCREEN)
            found[problem] = Tuned(
                winner=winner,
                trials=len(trials),
                kernels=len({stored.trial.candidate.kernel.name for stored in trials}),
                regret=regret(winner, measured),
            )
    return found


def regret(winner: Winner, measured: RecordedProblem) -> float:
    """By how much longer the winner takes than the candidate that is fastest in the last rounds."""
    assert winner.candidate is not None
    mine = next(t for t in measured.trials if t.candidate.key == winner.candidate.key)
    finals = [trial for trial in measured.trials if trial.further_us]
    best = min(finals, key=lambda trial: summarize(trial.further_us).median_us)
    if mine.further_us:
        return paired_ratio(mine.further_us, best.further_us).median - 1
    return paired_ratio(mine.common_us, best.common_us).median - 1


def test_the_recordings_are_varied() -> None:
    dtypes = [problem.dtype for problem in recorded()]
    assert dtypes.count("bf16") >= 12  # type: ignore[comparison-overlap]
    assert dtypes.count("fp8_e4m3") >= 6  # type: ignore[comparison-overlap]


def test_the_default_effort_is_near_the_optimum_and_mostly_finds_it(
    default: dict[Problem, Tuned],
) -> None:
    assert exceeding(default, regret=0.03, trials=48, kernels=16) == {}
    assert all(found.winner.replayed for found in default.values())
    assert median(found.regret for found in default.values()) <= 0.01


def exceeding(
    tuned: dict[Problem, Tuned], regret: float, trials: int, kernels: int
) -> dict[Problem, Tuned]:
    """The problems whose search took more, or whose winner is farther from the optimum."""
    return {
        problem: each
        for problem, each in tuned.items()
        if each.regret > regret or each.trials > trials or each.kernels > kernels
    }


def test_where_nothing_is_compiled_fewer_kernels_do() -> None:
    budget = BUDGETS[Effort.DEFAULT]
    recordings = [Recording(sweep, each) for sweep in sweeps() for each in sweep.problems.values()]
    regrets = curve("cold", planned(budget, ()), recordings, budget, counts=(budget.trials,))
    assert regrets.kernels == budget.cold == 12
    assert regrets.trials <= 48
    assert regrets.worst[0] <= 0.03
    assert regrets.medians[0] <= 0.01


@pytest.mark.long
def test_the_quick_effort_is_not_far_off(quick: dict[Problem, Tuned]) -> None:
    assert exceeding(quick, regret=0.05, trials=12, kernels=10) == {}


@pytest.mark.long
def test_the_same_recording_gives_the_same_winner(
    default: dict[Problem, Tuned], sqlite_template: Path, tmp_path: Path
) -> None:
    again = tuned(Effort.DEFAULT, sqlite_template, tmp_path)
    for problem, found in default.items():
        assert again[problem].winner.candidate == found.winner.candidate
        assert again[problem].trials == found.trials
