"""The headroom of shipped winners: its causes add up, and power is that of the recorded clocks."""

from __future__ import annotations

import pytest

from gemmsmith.answers.answer import Regime
from tests.support.replacing import replace
from tests.support.shipped import shipped_files
from tuner.exchange import read_winners
from tuner.explain.headroom import BY_HAND, Cause, Headroom, headroom
from tuner.trial import Winner


@pytest.fixture(scope="module")
def items() -> list[tuple[Winner, Headroom]]:
    winners = [winner for file in shipped_files() for winner in read_winners(file)]
    return [(winner, item) for winner in winners if (item := headroom(winner))]


def sustained(winner: Winner) -> tuple[float, float | None]:
    for item in winner.regimes:
        if item.regime is Regime.SUSTAINED:
            return item.median_us, item.default_us
    assert winner.statistics
    return winner.statistics.median_us, winner.baseline and winner.baseline.median_us


def test_causes_add_up_to_the_distance(items: list[tuple[Winner, Headroom]]) -> None:
    assert len(items) > 1700
    for winner, item in items:
        assert (item.time_us, item.default_us) == sustained(winner)
        assert 0 < item.floor_us <= item.time_us * (1 + 1e-9), winner.problem
        assert item.floor_us <= (item.default_us or item.time_us) * (1 + 1e-9), winner.problem
        assert sum(item.causes.values()) == pytest.approx(item.distance_us, abs=1e-6)
        for cause in Cause:
            if cause is not Cause.UNEXPLAINED:
                assert item.causes[cause] >= -1e-9, (winner.problem, cause)


def test_power_is_the_time_at_the_recorded_clock(items: list[tuple[Winner, Headroom]]) -> None:
    """At the highest FLOP per cycle of these types on record, computed here from the records."""
    best: dict[tuple[str, str], float] = {}
    for winner, _ in items:
        if winner.conditions is None:
            continue
        key = (winner.device.slug, winner.problem.operation.types.value)
        for us in filter(None, sustained(winner)):
            rate = winner.problem.flops / us / winner.conditions.sm_clock_mhz
            best[key] = max(best.get(key, 0.0), rate)
    slowed = 0
    for winner, item in items:
        if winner.conditions is None:
            continue
        rate = best[winner.device.slug, winner.problem.operation.types.value]
        at_clock_us = winner.problem.flops / (rate * winner.conditions.sm_clock_mhz)
        expected = max(0.0, at_clock_us - item.floor_us)
        assert item.causes[Cause.POWER] == pytest.approx(expected, abs=1e-6), winner.problem
        assert item.causes[Cause.POWER] <= item.distance_us + 1e-6, winner.problem
        slowed += expected > 0.05 * item.time_us
    assert slowed > 50


def test_a_kernel_by_hand_has_to_beat_the_default_too(
    items: list[tuple[Winner, Headroom]],
) -> None:
    for _, item in items:
        least = min(item.time_us, item.default_us or item.time_us)
        avoidable = sum(item.causes[cause] for cause in BY_HAND)
        assert item.by_hand_us == pytest.approx(max(0.0, avoidable - (item.time_us - least)))
        assert 0 <= item.by_hand_us <= least
    _, item = max(items, key=lambda pair: pair[1].by_hand_us)
    behind = replace(item, default_us=item.time_us - 0.5 * item.by_hand_us)
    assert behind.by_hand_us == pytest.approx(0.5 * item.by_hand_us)
    assert replace(item, default_us=item.floor_us).by_hand_us < item.by_hand_us
    assert replace(item, default_us=None).by_hand_us >= item.by_hand_us


def test_nothing_is_said_without_a_candidate_or_a_sustained_time(
    items: list[tuple[Winner, Headroom]],
) -> None:
    winner = next(winner for winner, _ in items if len(winner.regimes) == 3)
    boost = tuple(item for item in winner.regimes if item.regime is Regime.BOOST)
    assert headroom(replace(winner, candidate=None)) is None
    assert headroom(replace(winner, regimes=boost)) is None
    unknown = replace(winner.device, name="Unknown", memory_bandwidth=0, max_clock_mhz=0)
    assert headroom(replace(winner, device=unknown)) is None
    first = headroom(replace(winner, regimes=()))  # before gemmsmith 0.2
    assert first
    assert winner.statistics
    assert first.time_us == winner.statistics.median_us
    unread = headroom(replace(winner, conditions=None))
    assert unread
    assert unread.causes[Cause.POWER] == 0
