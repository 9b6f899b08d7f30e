"""`gemmsmith model` on the shipped sweeps, and what it never shows a model."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from gemmsmith.answer import Statistics
from gemmsmith.candidate import Candidate
from gemmsmith.device import DeviceModel
from gemmsmith.problem import DType, Layout, Problem
from service.cli.main import app
from service.cli.model import leave_one_out, marks, measurements, summaries
from tests.support.candidates import PROBLEM, named
from tests.support.replacing import replace
from tests.support.serving import ENVIRONMENT, H100, H200, new_settings
from tests.support.serving import trial as stored_trial
from tests.support.types import FLOATS
from tuner.backends import candidates
from tuner.devices.recording import SUFFIX, Sweep, SweepWriter
from tuner.search.cost_model import AnalyticModel
from tuner.search.features import Measured
from tuner.search.held_out import sizes
from tuner.search.learned import LearnedModel, path_for
from tuner.search.ranking import Ranker
from tuner.store import Store

ROOT = Path(__file__).resolve().parents[3]
SWEEPS = ROOT / "configs" / "sweeps"


@pytest.fixture(autouse=True)
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty database, and a folder to work in."""
    settings = new_settings(tmp_path)
    for name, value in settings.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GEMMSMITH_SWEEPS", str(SWEEPS))
    monkeypatch.chdir(tmp_path)
    return str(settings.database)


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["model", *(str(argument) for argument in arguments)])
    assert result.exit_code == code, result.output
    return result


class ByName:
    """Predicts what a table says of a kernel's name."""

    def __init__(self, **times: float) -> None:
        self.times = times

    def predict(
        self, problem: Problem, candidates: Sequence[Candidate], device: DeviceModel
    ) -> list[float]:
        return [self.times[c.kernel.name] for c in candidates]


def measured(problem: Problem = PROBLEM, **times: float) -> Measured:
    return Measured(
        problem=problem,
        device=H200,
        environments=(ENVIRONMENT,),
        candidates=tuple(named(name) for name in times),
        times_us=tuple(times.values()),
    )


@pytest.fixture(scope="module")
def few_sweeps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three problems of a shipped sweep, each of other sizes: soon trained on."""
    folder = tmp_path_factory.mktemp("sweeps")
    (path,) = SWEEPS.glob(f"*.fp8_e4m3{SUFFIX}")
    sweep = Sweep.load(path)
    with SweepWriter(folder / path.name, sweep.header) as writer:
        for recorded in list(sweep.problems.values())[:3]:
            writer.append(recorded)
    return folder


def test_marks_by_hand() -> None:
    one = measured(a=20.0, b=10.0, c=10.05, d=40.0)
    found = marks(one, ByName(a=1.0, d=2.0, c=3.0, b=4.0))
    assert found.rank == 3  # c is within 1% of b, and third in the predicted order
    assert found.regret == 1.0
    assert found.spearman == pytest.approx(1 - 6 * (4 + 9 + 1 + 4) / (4 * 15))
    assert found.error == pytest.approx((math.log(20) + math.log(10.05 / 3)) / 2)


def test_a_perfect_and_a_clueless_model() -> None:
    times = {"a": 20.0, "b": 10.0, "c": 30.0}
    perfect = marks(measured(**times), ByName(**times))
    assert (perfect.rank, perfect.regret, perfect.error) == (1, 0, 0)
    assert perfect.spearman == pytest.approx(1.0)
    assert marks(measured(**times), ByName(a=1.0, b=1.0, c=1.0)).spearman == 0.0


def test_what_is_held_out_is_never_trained_on() -> None:
    """Neither in the same nor in any other element type; other layouts are other problems."""
    first = Problem(m=64, n=64, k=64)
    problems = [
        *(replace(first, dtype=dtype) for dtype in FLOATS),
        replace(first, layout=Layout.NT),
        replace(first, batch=2),
        Problem(m=64, n=64, k=128),
        Problem(m=64, n=64, k=128, dtype=DType.FP8_E5M2),
    ]
    seen: list[list[Problem]] = []

    def train(given: Sequence[Measured]) -> Ranker:
        seen.append([one.problem for one in given])
        return ByName(a=1.0, b=2.0)

    data = [measured(problem, a=10.0, b=20.0) for problem in problems]
    for one in data:  # the analytic model must be able to say something of made-up kernels
        assert AnalyticModel().predict(one.problem, one.candidates, H200)
    found = leave_one_out(data, train=train)
    assert {one.problem for one in found} == set(problems)
    groups = list(dict.fromkeys(sizes(problem) for problem in problems))
    assert len(groups) == len(seen) == 4
    for group, given in zip(groups, seen, strict=True):
        assert given == [problem for problem in problems if sizes(problem) != group]


def test_a_held_out_problems_times_change_no_prediction(few_sweeps: Path) -> None:
    """By what comes out: the model of a fold is the same when the held-out times are nonsense."""
    data = measurements(few_sweeps, None, None)[:3]
    nonsense = [replace(data[0], times_us=data[0].times_us[::-1]), *data[1:]]
    from tuner.search.learned import fit

    kept: list[list[float]] = []

    def train(given: Sequence[Measured]) -> Ranker:
        model = fit(given, trained_at="")
        if data[0].problem not in [one.problem for one in given]:
            kept.append(model.predict(data[0].problem, data[0].candidates, H200))
        return model

    leave_one_out(data, train=train)
    leave_one_out(nonsense, train=train)
    assert kept[0] == kept[1]


def test_eval_and_fit_on_the_shipped_sweeps(tmp_path: Path) -> None:
    """The learned model is no worse than the analytic one at anything that is counted."""
    path = tmp_path / "model.json.zst"
    fitted = json.loads(run("fit", "-o", path, "--json").stdout)
    document = json.loads(run("eval", "--json").stdout)
    assert document["device"] == "nvidia-h200-132sm"
    recorded = [p for file in SWEEPS.glob(f"*{SUFFIX}") for p in Sweep.load(file).problems]
    assert len(document["problems"]) == len(recorded)
    analytic, learned = document["summary"]["analytic"], document["summary"]["learned"]
    assert learned["rank_median"] <= analytic["rank_median"]
    assert learned["rank_mean"] < analytic["rank_mean"]
    assert learned["regret_mean"] < analytic["regret_mean"]
    assert learned["spearman_mean"] > analytic["spearman_mean"] + 0.05
    assert learned["error_median"] < analytic["error_median"]
    assert fitted["card"]["held_out"] == document["summary"]
    assert fitted["bytes"] == path.stat().st_size
    assert LearnedModel.load(path).card.held_out["learned"] == learned
    trials = sum(one["candidates"] for one in document["problems"])
    assert fitted["card"]["trials"] == trials

    shipped = LearnedModel.load(path_for("nvidia-h200-132sm", ROOT / "configs" / "models"))
    assert shipped.card.features == tuple(fitted["card"]["features"])
    assert shipped.card.parameters == fitted["card"]["parameters"]
    assert {each.problem for each in shipped.card.problems} <= set(recorded)


def test_tables_name_both_models(few_sweeps: Path) -> None:
    shown = run("eval", "--sweeps", few_sweeps).stdout
    assert "16×4096×4096 fp8_e4m3 tn" in shown
    assert "rank analytic" in shown
    assert "rank learned" in shown
    assert "problems held out" in shown


def test_fit_writes_where_the_program_looks(few_sweeps: Path, tmp_path: Path) -> None:
    shown = run("fit", "--sweeps", few_sweeps).stdout
    path = path_for("nvidia-h200-132sm")
    assert str(path) in shown
    assert (tmp_path / path).is_file()


def store_trials(url: str, problem: Problem, device: DeviceModel, us: float) -> int:
    """Trials of every candidate of `problem`; their number."""
    trials = [
        replace(
            stored_trial(problem),
            device=device,
            candidate=candidate,
            statistics=Statistics(median_us=us + i, ci_low_us=us, ci_high_us=us + i, samples=5),
        )
        for i, candidate in enumerate(candidates(problem, device))
    ]
    with Store.open(url) as store:
        store.add_trials(trials)
    return len(trials)


def test_trials_of_a_database_count_when_it_is_given(
    few_sweeps: Path, database: str, tmp_path: Path
) -> None:
    problem = Problem(m=32, n=512, k=512)
    slug = Sweep.load(next(few_sweeps.iterdir())).header.device.slug
    assert slug == H200.slug
    count = store_trials(database, problem, H200, 5.0)
    assert problem not in {one.problem for one in measurements(few_sweeps, None, None)}
    found = {one.problem: one for one in measurements(few_sweeps, database, None)}
    assert len(found[problem].candidates) == count
    empty = tmp_path / "empty"
    empty.mkdir()
    (only,) = measurements(empty, database, None)
    assert only.problem == problem
    run("eval", "--sweeps", empty, "--database", database, code=1)
    shown = run("fit", "--sweeps", empty, "--database", database, "-o", "one.json.zst").stdout
    assert "1 problems" in shown
    assert LearnedModel.load(tmp_path / "one.json.zst").card.held_out == {}


def test_several_device_models_must_be_chosen_from(few_sweeps: Path, database: str) -> None:
    store_trials(database, Problem(m=32, n=512, k=512), H100, 5.0)
    arguments = ("eval", "--sweeps", few_sweeps, "--database", database)
    said = run(*arguments, code=1).stderr
    assert f"--device {H100.slug} or {H200.slug}" in said
    said = run(*arguments, "--device", "gtx", code=1).stderr
    assert H200.slug in said
    assert H100.slug not in {
        one.device.slug for one in measurements(few_sweeps, database, H200.slug)
    }


def test_nothing_to_learn_from(tmp_path: Path) -> None:
    empty = tmp_path / "none"
    said = run("fit", "--sweeps", empty, "-o", "m.json.zst", code=1).stderr
    assert "--sweeps" in said
    assert not (tmp_path / "m.json.zst").exists()


@pytest.mark.parametrize("name", ["model.txt", "model.json", ".json.zst"])
def test_the_files_name_is_checked_first(name: str) -> None:
    assert "NAME.json.zst" in run("fit", "-o", name, code=2).stderr


def test_summaries_take_the_worst_of_each_kind() -> None:
    data = [
        measured(Problem(m=64, n=64, k=64), a=10.0, b=20.0),
        measured(Problem(m=64, n=64, k=128), a=30.0, b=20.0),
    ]

    def train(_: Sequence[Measured]) -> Any:
        return ByName(a=1.0, b=2.0)

    learned = summaries(leave_one_out(data, train=train))["learned"]
    assert (learned["rank_median"], learned["rank_worst"]) == (1.5, 2)
    assert (learned["spearman_mean"], learned["spearman_worst"]) == (0, -1)
    assert learned["regret_worst"] == 0.5
