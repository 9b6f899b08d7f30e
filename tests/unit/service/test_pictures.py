"""What the pages draw and say: one run in each plot, what is served in the map's colours."""

from __future__ import annotations

import pytest

from gemmsmith.answers.answer import InRegime, Ratio, Regime
from gemmsmith.core.config import Use
from service.charts.heatmap import heatmap
from service.charts.intervals import regimes
from service.charts.trials import TRAITS, by_trait, convergence
from service.pages.comparisons import changes, curl, python
from service.pages.plots import Plots, plots
from service.report.glance import Glances
from service.report.verdict import faster, verdict
from tests.support.records import DEVICE, OTHER_DEVICE, PROBLEM, failed_trial, trial, winner
from tests.support.replacing import replace
from tuner.store import Store
from tuner.suites import load, shipped
from tuner.trial import Phase

H200 = DEVICE.slug
AHEAD = Ratio(median=1.123, ci_low=1.11, ci_high=1.14)


def drawn(store: Store) -> Plots:
    return plots(
        store.winner(PROBLEM, H200),
        store.listing.ranking(PROBLEM, H200),
        store.revisions(PROBLEM, H200),
        store.tried_on(PROBLEM, H200),
    )


def run(store: Store, job: str, *, replayed: bool = False) -> None:
    """A run of three trials, of which the first is in the finals and is promoted."""
    made = [replace(trial(i, job=job), replayed=replayed) for i in range(3)]
    store.add_trials([*made, replace(made[0], phase=Phase.FINAL)])
    store.promote(replace(winner(), job=job, replayed=replayed))


def test_a_verdict_is_words() -> None:
    assert verdict(Use.CUTLASS, AHEAD, "cuBLAS") == "12.3% faster"
    assert verdict(Use.CUBLAS, AHEAD, "torch") == "torch stays"
    assert verdict(Use.CUBLAS, replace(AHEAD, median=0.995), "cuBLAS") == "cuBLAS stays"
    assert verdict(Use.CUBLASLT, None, "cuBLAS") == "not compared"
    said = [faster(ratio) for ratio in (2.6, 0.98, 1.0004, 1.5)]
    assert said == ["2.60 times as fast", "2.0% slower", "as fast", "50.0% faster"]


def test_a_run_is_drawn_with_its_own_default(store: Store) -> None:
    run(store, "first")
    chart = drawn(store)
    assert not chart.served, "the finals show it"
    assert chart.is_served
    assert "cuBLAS" in chart.finals
    assert (chart.trials, chart.failed, chart.runs) == (3, 0, 1)
    assert [name for name, _ in chart.traits] == ["Tile", "Cluster", "Stages"]


def test_what_another_run_measured_is_drawn_apart(store: Store) -> None:
    store.promote(replace(winner(time=11.37), job="measured"))
    run(store, "replayed", replayed=True)
    chart = drawn(store)
    assert "11.37" in chart.served
    assert "11.37" not in chart.finals
    assert chart.promoted is not None
    assert (chart.promoted.job, chart.is_served, chart.replayed) == ("replayed", False, True)
    assert chart.finals.count('class="behind"') == 1, "its own default's line"


def test_finals_that_promoted_nothing_known_have_no_default(store: Store) -> None:
    store.add_trials([replace(trial(job="lost"), phase=Phase.FINAL)])
    chart = drawn(store)
    assert chart.finals
    assert "cuBLAS" not in chart.finals
    assert not chart.served
    assert chart.promoted is None


def test_the_best_so_far_only_falls(store: Store) -> None:
    times = [14.0, 10.0, 12.0, 9.0]
    made = [trial(i, job="job") for i in range(4)]
    made = [
        replace(one, statistics=replace(one.statistics, median_us=us))
        for one, us in zip(made, times, strict=True)
    ]
    store.add_trials([failed_trial(7), *made[:2]])
    assert convergence(()) == ""
    assert convergence(store.tried_for("job")[:1]) == ""
    store.add_trials(made[2:])
    picture = convergence(store.tried_for("job"))
    assert "9.00 µs after 4 trials" in picture
    first = picture.split('class="best" d="')[1].split('"')[0]
    falls = [float(step.split("H")[0]) for step in first.split("V")[1:]]
    assert falls == sorted(falls)
    assert len(falls) == 2, "to 10 and to 9; 12 is no step"
    with_result = convergence(store.tried_for("job"), 8.5)
    assert "9.00 µs after 4 trials; the finals&#x27; result is 8.50 µs" in with_result
    assert with_result.count(">result 8.50<") == 2


def test_a_column_says_how_many_failed(store: Store) -> None:
    store.add_trials([trial(1), trial(2), failed_trial(3)])
    tried = store.tried_on(PROBLEM, H200)
    picture = by_trait(tried, *TRAITS[0])
    assert "2 measured, 1 failed" in picture
    assert picture.split('class="dots" d="')[1].split('"')[0].count("h0") == 2
    assert by_trait(tried[2:], *TRAITS[0]) == ""


def test_regimes_show_what_power_asks() -> None:
    found = [
        InRegime(regime=regime, speedup=AHEAD, median_us=10.0, default_us=11.23)
        for regime in (Regime.SUSTAINED, Regime.BOOST)
    ]
    picture = regimes(found, 1.059, 1.12, "torch")
    for said in ("sustained", "boost", "penalty 1.059", "geometric mean", "against 11.23", "torch"):
        assert said in picture
    assert "penalty" not in regimes(found, 0.99, 1.12, "torch")
    assert regimes([], 1.059, None, "torch") == ""


@pytest.mark.parametrize(
    ("use", "ratio", "colour", "words"),
    [
        (Use.CUBLAS, 1.004, "stays", "the default stays, best candidate 1.004"),
        (Use.CUBLAS, None, "stays", "the default stays, best candidate not paired"),
        (Use.CUTLASS, 1.004, "r0", "1.004"),
        (Use.CUTLASS, 5.0, "r5", "5.000"),
    ],
)
def test_a_cell_has_the_colour_of_what_is_served(
    store: Store, use: Use, ratio: float | None, colour: str, words: str
) -> None:
    speedup = None if ratio is None else replace(AHEAD, median=ratio)
    store.promote(replace(winner(), use=use, speedup=speedup))
    picture = heatmap(store.listing.winners(H200).items, lambda problem: f"/{problem.m}")
    assert f'<a href="/256" class="cell {colour}">' in picture
    assert f"<title>{PROBLEM}: {words}</title>" in picture


def test_revisions_say_what_changed(store: Store) -> None:
    assert changes([]) == []
    store.promote(winner(time=12.0))
    other = replace(winner().environment, driver="590.1")
    store.promote(replace(winner(time=10.0), candidate=trial(3).candidate, environment=other))
    [(_, newer), (_, older)] = changes(store.revisions(PROBLEM, H200))
    assert newer == "another kernel, driver 590.1, ratio +20.0%"
    assert older == ""


def test_hostile_names_stay_within_their_quotes() -> None:
    device = 'gpu\'; rm -rf "$HOME"'
    command = curl(PROBLEM, device, "http://x'y", with_key=True)
    assert command.startswith('curl -s -H "Authorization: Bearer $GEMMSMITH_API_KEY" ')
    assert "rm -rf" not in command, "it is encoded in the URL"
    for with_key in (False, True):
        program = python(replace(PROBLEM, batch=3), device, "http://x'y", with_key=with_key)
        compile(program, "snippet", "exec")
        assert "batch=3" in program
        assert ('api_key=os.environ["GEMMSMITH_API_KEY"]' in program) == with_key


def test_a_glance_adds_up_what_is_served(store: Store) -> None:
    suite = load(shipped() / "llm.toml")
    problems = [problem for _, problem in suite.problems("bf16")]
    for i, problem in enumerate(problems[:60]):
        changed = replace(winner(problem), job=None)
        store.promote(replace(changed, use=Use.CUBLAS) if i % 2 else changed)
    store.promote(replace(winner(), device=OTHER_DEVICE))
    glances = Glances(store)
    glance = glances.at(H200)
    here, there = sorted(glance.standings, key=lambda one: -one.problems)
    assert (here.dtype, here.problems, here.ahead) == ("bf16", 60, 30)
    assert here.saved == pytest.approx((1 - 10 / 12) / 2)
    assert (there.device, there.problems) == (OTHER_DEVICE.slug, 1)
    [saving] = [one for one in glance.suites if one.suite == "llm"]
    assert (saving.dtype, saving.covered, saving.problems) == ("bf16", 60, len(problems))
    assert saving.default_us == pytest.approx(60 * 12.0)
    assert saving.share == pytest.approx((1 - 10 / 12) / 2)
    assert glances.at(H200) is glance, "nothing has changed"
    assert glances.at("no-such-device").suites == ()
    assert store.overview.operations() == sorted({p.operation.key for p in problems[:60]})
