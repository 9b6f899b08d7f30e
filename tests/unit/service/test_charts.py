"""What charts are drawn with, and what holds for every chart: scales, ticks, text, style."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from gemmsmith.answers.answer import InRegime, Ratio, Regime, Statistics
from gemmsmith.core.problem import Problem
from service.charts import intervals, ratios, regret, rooflines, trials
from service.charts.draw import STYLE, WIDTH, Scale, legend, svg, text, upright
from service.charts.heatmap import heatmap
from service.report.problem_rows import device_report, row_of
from service.report.roofs import Roof
from tests.support.records import PROBLEM, failed_trial, trial
from tests.support.replacing import replace
from tests.support.serving import winner
from tuner.search.evaluation import Curve
from tuner.store import Store
from tuner.store.listing import Search

HOSTILE = '<b title="x">&\'</b>'
TIME = Statistics(median_us=10.0, ci_low_us=9.9, ci_high_us=10.2, samples=3)
RATIO = Ratio(median=1.1, ci_low=1.05, ci_high=1.2)
SMALL, LARGE = Problem(m=16, n=4096, k=4096), Problem(m=8192, n=8192, k=8192)
ROOFS = (
    Roof(bandwidth=4e12, peak=700e12, measured=True),
    Roof(bandwidth=4.8e12, peak=1000e12, measured=False),
)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(
    ("low", "high"),
    [(0.5, 12.0), (0.67, 1.63), (0.995, 1.004), (1.0, 2600.0), (110.0, 990.0), (3e-3, 2e5)],
)
@pytest.mark.parametrize("length", [200.0, 880.0])
def test_ticks_are_round_few_and_inside(low: float, high: float, length: float, log: bool) -> None:
    ticks = Scale(low, high, 0, length, log=log).ticks(80)
    assert ticks == sorted(set(ticks))
    assert all(low <= tick <= high for tick in ticks)
    assert len(ticks) >= 1
    if not log:
        assert len(ticks) <= length / 80 + 1
    for tick in ticks:
        assert len(f"{tick:.4g}".strip("0.").replace("e", "")) <= 7
        assert float(f"{tick:g}") == pytest.approx(tick)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(("start", "end"), [(0, 100), (100, 0)])
def test_a_scale_draws_what_lies_beyond_at_its_ends(start: float, end: float, log: bool) -> None:
    scale = Scale(1.0, 100.0, start, end, log=log)
    assert [scale(value) for value in (0.01, 1.0, 100.0, 1e9)] == [start, start, end, end]
    assert scale(10.0 if log else 50.5) == pytest.approx(50)
    assert Scale(7.0, 7.0, start, end, log=log)(7.0) == start


def charts(store: Store) -> dict[str, str]:
    """A chart of every kind."""
    report = device_report([winner(SMALL), winner(LARGE, us=1800.0)], None)
    store.promote(winner(PROBLEM))
    store.add_trials([trial(0), trial(1), failed_trial(2)])
    tried = store.tried_on(PROBLEM, winner(PROBLEM).device.slug)
    listed = store.listing.winners(winner(PROBLEM).device.slug, Search()).items
    regime = InRegime(regime=Regime.BOOST, speedup=RATIO, median_us=9.0, default_us=None)
    curve = Curve(
        name=HOSTILE,
        counts=(1, 2, 4),
        regrets={PROBLEM: (9.0, 0.1, 0.0)},
        trials=4,
        kernels=4,
    )
    return {
        "times": intervals.times([intervals.timed(HOSTILE, HOSTILE, "won", TIME, (9.9, 10.0))]),
        "regimes": intervals.regimes([regime, regime], 1.3, 1.1, HOSTILE),
        "ratios": ratios.ratios(report.rows),
        "classes": ratios.classes(report, "bf16"),
        "roofline": rooflines.of_rows(report.rows, HOSTILE, ROOFS),
        "winners": rooflines.of_winners(listed, [(HOSTILE, roof) for roof in ROOFS]),
        "convergence": trials.convergence(tried, 9.0),
        "trait": trials.by_trait(tried, HOSTILE, lambda _: HOSTILE),
        "map": heatmap(listed, lambda _: HOSTILE),
        "regret": regret.chart([curve]),
        "parts": svg(
            60, HOSTILE, text(1, 1, HOSTILE), upright(1, 1, HOSTILE), legend(1, [("", HOSTILE)])
        ),
    }


def test_every_chart_is_well_formed_named_and_within_its_frame(store: Store) -> None:
    for name, chart in charts(store).items():
        drawn = ElementTree.fromstring(chart)
        assert drawn.get("aria-label"), name
        _, _, width, height = map(float, (drawn.get("viewBox") or "").split())
        assert width == WIDTH
        links = drawn.findall(".//{*}a")
        assert drawn.get("role") == ("group" if links else "img"), name
        for element in drawn.iter():
            for attribute, limit in (("x", width), ("cx", width), ("y", height), ("cy", height)):
                assert 0 <= float(element.get(attribute) or 0) <= limit, (name, element.attrib)
        assert not drawn.findall(".//{*}b"), name
        assert "".join(drawn.itertext()).count("&amp;") == 0, "escaped twice"


def test_every_class_of_a_chart_has_a_style(store: Store) -> None:
    css = STYLE.read_text(encoding="utf-8")
    styled = set(re.findall(r"\.([a-z][a-z0-9]*)", css))
    for name, chart in charts(store).items():
        used = {
            word for classes in re.findall(r'class="([^"]*)"', chart) for word in classes.split()
        }
        assert used <= styled | {"column"}, name


def test_what_has_no_figures_is_not_drawn() -> None:
    lost = replace(winner(SMALL), candidate=None, statistics=None, speedup=None)
    for rows in ((), (row_of(lost, None),)):
        assert rooflines.of_rows(rows, "bf16", ROOFS) == ratios.ratios(rows) == ""
    assert ratios.classes(device_report([lost], None), "bf16") == ""
    assert intervals.times([]) == intervals.regimes([], 1.1, None, "torch") == ""
    assert rooflines.of_winners([], []) == trials.convergence([]) == heatmap([], str) == ""


@pytest.mark.parametrize(("problem", "us"), [(SMALL, 10.0), (LARGE, 1800.0)])
def test_both_parts_of_a_roof_are_drawn_on_either_side_of_the_ridge(
    problem: Problem, us: float
) -> None:
    drawn = rooflines.of_rows([row_of(winner(problem, us=us), None)], "bf16", ROOFS)
    for kind in ("roof", "roof nominal"):
        [line] = re.findall(rf'<path class="{kind}" d="M([0-9. ]+) L([0-9. ]+) H', drawn)
        begin, low, ridge, peak = (float(place) for part in line for place in part.split())
        assert ridge > begin + 20, "it slopes"
        assert peak < low
    assert "ridge 175" in drawn
    assert "measured: 700 TFLOP/s · 4.00 TB/s" in drawn
    assert "nominal: 1000 TFLOP/s · 4.80 TB/s" in drawn


def test_a_ratio_beyond_the_edge_has_its_number() -> None:
    far = [
        replace(winner(SMALL), speedup=replace(RATIO, median=m, ci_low=m, ci_high=m))
        for m in (0.1, 5.0)
    ]
    drawn = ratios.ratios([row_of(extreme, None) for extreme in far])
    assert re.findall(r">(0\.1|5)</text>", drawn) == ["0.1", "5"]


def test_the_chart_of_an_evaluation_brings_its_style() -> None:
    curve = Curve(name="x", counts=(8,), regrets={PROBLEM: (0.5,)}, trials=8, kernels=8)
    assert STYLE.read_text(encoding="utf-8") in regret.chart([curve])
