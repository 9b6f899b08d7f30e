"""Power limits, whose clocks are looked at, and what a lower one costs."""

from __future__ import annotations

import pytest

from gemmsmith.answers.answer import Conditions
from gemmsmith.core.problem import Layout, Problem
from tuner.measure.graphs import Replay
from tuner.measure.power import (
    beyond_all_penalties,
    gain,
    is_counted,
    is_power_limited,
    penalties,
    penalty,
    to_measure,
)
from tuner.trial import Rounds


def rounds(
    *times: float, baseline: float = 10.0, clock: float = 1500.0, power: float = 700.0
) -> Rounds:
    return Rounds(
        samples_us=tuple((time,) * 3 for time in times),
        baseline_us=(baseline,) * 3,
        conditions=Conditions(sm_clock_mhz=clock, power_w=power, temperature_c=60),
    )


def test_the_power_limit_shows_in_the_clock() -> None:
    assert is_power_limited((rounds(clock=1500), rounds(clock=1980)), 0)
    assert not is_power_limited((rounds(clock=1965), rounds(clock=1980)), 0)
    assert not is_power_limited((rounds(clock=0), rounds(clock=1980)), 0)
    assert not is_power_limited((rounds(clock=1500), rounds(clock=0)), 0)


@pytest.mark.parametrize(
    ("dtype", "counted"),
    [
        ("bf16", True),
        ("bf16.out_f32", True),
        ("bf16.out_f32.accumulate", False),
        ("bf16.out_f32.group_depth.accumulate", False),
    ],
)
def test_sums_into_fp32_pay_nothing(dtype: str, counted: bool) -> None:
    assert is_counted(Problem(m=64, n=64, k=64, dtype=dtype, layout=Layout.NT).operation) is counted


def test_who_draws_half_of_the_limit_in_any_state_would_come_to_it() -> None:
    calm, drawing = rounds(clock=1980, power=200), rounds(clock=1980, power=360)
    assert is_power_limited((calm, drawing), 700)
    assert is_power_limited((drawing, calm), 700)
    assert is_power_limited((calm, calm, drawing), 700)
    assert not is_power_limited((calm, rounds(clock=1980, power=340)), 700)
    assert not is_power_limited((calm, rounds(clock=1980, power=0)), 0)


def test_the_clocks_of_the_best_and_of_the_best_of_larger_tiles_are_looked_at() -> None:
    # Tiles: large, the best's, larger; then two that gain in one state only.
    hot = rounds(9.9, 9.0, 9.5, 8.0, 10.5)
    cool = rounds(9.8, 9.0, 9.6, 10.2, 9.0)
    assert to_measure((hot, cool), tiles=[32768, 16384, 24576, 16384, 65536]) == [1, 2]
    assert to_measure((hot, cool), tiles=[16384] * 5) == [1]


def test_who_took_no_part_in_a_state_does_not_gain() -> None:
    first = rounds(8.0, 8.0)
    second = Rounds(
        samples_us=((), (8.0,) * 3), baseline_us=(10.0,) * 3, conditions=first.conditions
    )
    assert gain((first, second), 0) == 0.0
    assert gain((first, second), 1) == pytest.approx(1.25)
    assert beyond_all_penalties((first, second)) == []


def test_who_is_twice_as_fast_in_all_states_gains_whatever_power_costs() -> None:
    hot, cool = rounds(4.0, 4.0, 9.0), rounds(4.5, 6.0, 9.0)
    assert beyond_all_penalties((hot, cool)) == [0]
    assert penalty(1980.0 / 2, 1980.0) > 2.0 > penalty(1300.0, 1980.0)


def test_where_nobody_gains_nobody_is_looked_at() -> None:
    assert to_measure((rounds(10.1), rounds(9.0)), tiles=[1]) == []
    assert to_measure((rounds(), rounds()), tiles=[]) == []


def test_a_lower_clock_has_a_price_and_a_higher_one_a_reward() -> None:
    assert penalty(1500.0, 1500.0) == 1.0
    assert penalty(1365.0, 1628.0) == pytest.approx(1.221, abs=0.001)
    assert penalty(1470.0, 1440.0) == pytest.approx(0.980, abs=0.001)
    assert penalty(0.0, 1500.0) == penalty(1500.0, 0.0) == 1.0


class Clocks:
    """What each graph's clock is, look by look; the last graph is cuBLAS's."""

    def __init__(self, *seen: list[float]) -> None:
        self.graphs: list[Replay] = [Named(str(i)) for i in range(len(seen))]
        self.seen = {graph: iter(clocks) for graph, clocks in zip(self.graphs, seen, strict=True)}
        self.announced: list[int] = []

    def penalties(self, *gains: float, free_mhz: float = 1980.0) -> list[float | None]:
        def clock(graph: Replay) -> float:
            assert graph is self.graphs[self.announced[-1]]
            return next(self.seen[graph])

        return penalties(self.graphs, gains, free_mhz, clock, self.announced.append)


class Named:
    launches = 1

    def __init__(self, name: str) -> None:
        self.name = name

    def enqueue(self) -> None: ...

    def close(self) -> None: ...


def test_prices_are_of_clocks_beside_cublas() -> None:
    clocks = Clocks([1400.0], [1450.0], [1500.0])
    assert clocks.penalties(1.3, 1.25) == [penalty(1400.0, 1500.0), penalty(1450.0, 1500.0)]
    assert clocks.announced == [0, 2, 1]


def test_who_cannot_be_the_best_is_not_looked_at() -> None:
    clocks = Clocks([1500.0], [], [1500.0])
    assert clocks.penalties(1.3, 1.25) == [1.0, None]
    assert clocks.announced == [0, 2]


def test_whose_clock_power_does_not_lower_pays_nothing() -> None:
    clocks = Clocks([1975.0], [], [])
    assert clocks.penalties(1.3, 1.25) == [1.0, None]
    assert clocks.announced == [0]
    assert (
        Clocks([1975.0], [1975.0], [1980.0]).penalties(1.3, 1.299, free_mhz=0)
        == [penalty(1975.0, 1980.0)] * 2
    )


def test_a_look_that_tells_nothing_does_not_count() -> None:
    gained = penalty(1400.0, 1500.0)
    assert Clocks([1400.0, 0.0], [1500.0, 1500.0]).penalties(gained) == [gained]
    assert Clocks([0.0], [1500.0]).penalties(1.3) == [1.0]


def test_where_the_price_is_about_what_is_gained_both_are_looked_at_again() -> None:
    clocks = Clocks([1400.0, 1420.0], [1500.0, 1480.0])
    assert clocks.penalties(penalty(1400.0, 1500.0) + 0.01) == [penalty(1410.0, 1490.0)]
    assert clocks.announced == [0, 1, 0, 1]


def test_no_more_looks_are_taken_than_fit_in_the_time() -> None:
    clocks = Clocks([1300.0], [1400.0, 1420.0], [1500.0])
    gained = penalty(1400.0, 1500.0) + 0.01
    assert clocks.penalties(gained + 0.001, gained) == [
        penalty(1300.0, 1500.0),
        penalty(1410.0, 1500.0),
    ]
    assert clocks.announced == [0, 2, 1, 1]
