"""What people are told of the regimes' and of power's part in an answer."""

from __future__ import annotations

import pytest

from gemmsmith.answers.answer import InRegime, Ratio, Regime
from gemmsmith.core.config import Use
from service.report import regimes
from service.report.verdict import why_cublas_stays

FASTER = Ratio(median=1.05, ci_low=1.04, ci_high=1.06)
SLOWER = Ratio(median=0.99, ci_low=0.98, ci_high=1.01)


def test_cublas_stays_because_of_power() -> None:
    told = why_cublas_stays(Use.CUBLAS, FASTER, 1.08)
    assert told.endswith("at the power limit: it must be 1.080 × as fast")
    # Of winners that are older than prices no more is known.
    assert why_cublas_stays(Use.CUBLAS, FASTER, None).endswith("at the power limit")


def test_cublas_stays_because_of_another_regime() -> None:
    assert "every regime" in why_cublas_stays(Use.CUBLAS, FASTER, 0.996)


@pytest.mark.parametrize(
    ("use", "speedup"), [(Use.CUTLASS, FASTER), (Use.CUBLAS, SLOWER), (Use.CUBLAS, None)]
)
def test_where_nothing_is_odd_nothing_is_told(use: Use, speedup: Ratio | None) -> None:
    assert why_cublas_stays(use, speedup, 1.08) == ""


def ratio(median: float) -> Ratio:
    return Ratio(median=median, ci_low=median - 0.01, ci_high=median + 0.01)


def test_the_served_figure_leads_and_a_penalty_above_it_is_no_riddle() -> None:
    measured = [
        InRegime(regime=Regime.SUSTAINED, speedup=ratio(1.2), median_us=10.0, default_us=12.0),
        InRegime(regime=Regime.BOOST, speedup=ratio(1.074), median_us=9.0, default_us=9.67),
    ]
    assert list(regimes.lines(ratio(1.074), measured, 1.102)) == [
        ("speed-up", "1.074  (1.064 … 1.084) × the default, in the regime where it gains least"),
        ("regime", "sustained   1.200  (1.190 … 1.210): 10.00 µs, default 12.00 µs"),
        ("regime", "boost       1.074  (1.064 … 1.084): 9.00 µs, default 9.67 µs"),
        ("penalty", "1.102; the mean of the regimes must exceed it: 1.135"),
    ]
    said = regimes.summary(measured, 1.102)
    assert said == "regimes: sustained 1.200, boost 1.074; power penalty 1.102"


def test_of_winners_without_regimes_only_what_is_known_is_said() -> None:
    assert list(regimes.lines(FASTER, (), None)) == [
        ("speed-up", "1.050  (1.040 … 1.060) × the default")
    ]
    assert list(regimes.lines(None, (), 1.02)) == [
        ("penalty", "1.020; the mean of the regimes must exceed it, and was not kept")
    ]
    alone = InRegime(regime=Regime.BOOST, speedup=None, median_us=9.0, default_us=None)
    assert list(regimes.lines(None, [alone], None)) == [("regime", "boost       9.00 µs")]
    assert regimes.summary([alone], None) == ""
    assert regimes.mean([alone]) is None
