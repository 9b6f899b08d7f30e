"""What people are told of power's part in an answer."""

from __future__ import annotations

import pytest

from gemmsmith.answer import Ratio, Use
from service.report.power_penalty import power_paid, why_cublas_stays

FASTER = Ratio(median=1.05, ci_low=1.04, ci_high=1.06)
SLOWER = Ratio(median=0.99, ci_low=0.98, ci_high=1.01)


def test_cublas_stays_because_of_power() -> None:
    told = why_cublas_stays(Use.CUBLAS, FASTER, 1.08)
    assert told.endswith("at the power limit: it must be 1.080 × as fast")
    # Of winners that are older than prices no more is known.
    assert why_cublas_stays(Use.CUBLAS, FASTER, None).endswith("at the power limit")


def test_cublas_stays_because_of_another_state() -> None:
    assert "every state" in why_cublas_stays(Use.CUBLAS, FASTER, 0.996)


@pytest.mark.parametrize(
    ("use", "speedup"), [(Use.CUTLASS, FASTER), (Use.CUBLAS, SLOWER), (Use.CUBLAS, None)]
)
def test_where_nothing_is_odd_nothing_is_told(use: Use, speedup: Ratio | None) -> None:
    assert why_cublas_stays(use, speedup, 1.08) == ""


def test_a_winner_whose_power_costs_something_says_what() -> None:
    assert power_paid(Use.CUTLASS, 1.1019).startswith("its power costs 1.102;")
    for use, price in ((Use.CUTLASS, 1.001), (Use.CUTLASS, None), (Use.CUBLAS, 1.08)):
        assert power_paid(use, price) == ""
