"""Tuning against the recorded H200 finds what an exhaustive look at the recording finds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gemmsmith.tuning import Effort
from tuner.devices import open_device
from tuner.devices.base import Device
from tuner.devices.recording import SUFFIX, RecordedProblem, Sweep
from tuner.measure.statistics import paired_ratio, summarize
from tuner.search.cost_model import AnalyticModel
from tuner.search.run import tune
from tuner.store import Store

SWEEPS = Path(__file__).resolve().parents[2] / "configs" / "sweeps"
RECORDED = {
    str(problem): recorded
    for path in sorted(SWEEPS.glob(f"*{SUFFIX}"))
    for problem, recorded in Sweep.load(path).problems.items()
}

RESOLUTION_US = 0.01
"""Of the times in a recording: intervals of products of a few microseconds collapse to a point."""


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with open_device("replay:", sweeps=SWEEPS) as opened:
        yield opened


def test_the_recordings_are_varied() -> None:
    dtypes = [recorded.problem.dtype for recorded in RECORDED.values()]
    assert dtypes.count("bf16") >= 12  # type: ignore[comparison-overlap]
    assert dtypes.count("fp8_e4m3") >= 6  # type: ignore[comparison-overlap]


@pytest.mark.parametrize("name", RECORDED)
def test_the_default_effort_finds_the_recorded_optimum(
    name: str, device: Device, tmp_path: Path
) -> None:
    recorded = RECORDED[name]
    with Store.open(f"sqlite:///{tmp_path / 'tuned.db'}", create=True) as store:
        winner = tune(
            recorded.problem,
            device=device,
            store=store,
            builder=None,
            ranker=AnalyticModel(),
            effort=Effort.DEFAULT,
        )
    assert winner.replayed
    assert winner.candidate is not None
    found = {trial.candidate.key: trial for trial in recorded.trials}[winner.candidate.key]
    best = optimum(recorded)
    assert summarize(found.further_us).median_us <= summarize(best).ci_high_us + RESOLUTION_US
    assert paired_ratio(found.further_us, best).median <= 1.01


def optimum(recorded: RecordedProblem) -> tuple[float, ...]:
    """Further rounds of the candidate that is fastest in them."""
    timed = [trial.further_us for trial in recorded.trials if trial.further_us]
    return min(timed, key=lambda samples: summarize(samples).median_us)
