"""Promotion: never slower, never a surprise."""

from __future__ import annotations

import random

import pytest

from gemmsmith.answers.answer import Conditions
from gemmsmith.core.candidate import Candidate
from gemmsmith.core.config import Use
from gemmsmith.core.kernel import TileScheduler
from gemmsmith.core.launch import Decomposition, Launch
from tests.support.candidates import EXACT, PROBLEM, named
from tests.support.replacing import replace
from tuner.search.promotion import decide
from tuner.trial import Finals, InSpread, OnSpread, Rival, Rounds


def finals(
    times: dict[Candidate, float], baseline: float, noise: float = 0.001, workspace: int = 0
) -> Finals:
    """25 paired rounds whose drift is common to all, as clocks make it."""
    rng = random.Random(7)
    drift = [1 + rng.uniform(-0.05, 0.05) for _ in range(25)]

    def rounds(time: float) -> tuple[float, ...]:
        return tuple(time * d * (1 + rng.uniform(-noise, noise)) for d in drift)

    return Finals(
        problem=PROBLEM,
        candidates=tuple(times),
        samples_us=tuple(rounds(time) for time in times.values()),
        baseline_us=rounds(baseline),
        correctness=(EXACT,) * len(times),
        workspace_bytes=(workspace,) * len(times),
        conditions=Conditions(sm_clock_mhz=1980, power_w=500, temperature_c=50),
    )


def in_two_states(
    sustained: dict[Candidate, float], boost: dict[Candidate, float], baselines: tuple[float, float]
) -> Finals:
    """Finals at the power limit, and rested."""
    hot, cool = finals(sustained, baselines[0]), finals(boost, baselines[1])
    calm = Conditions(sm_clock_mhz=1500, power_w=700, temperature_c=60)
    rounds = Rounds(samples_us=cool.samples_us, baseline_us=cool.baseline_us, conditions=calm)
    return replace(hot, boost=rounds)


def test_what_wins_at_the_power_limit_only_is_not_recommended() -> None:
    """As on an H200: cuBLAS's large tiles gain more from a higher clock."""
    only = named("only")
    decision = decide(in_two_states({only: 10.0}, {only: 9.3}, baselines=(11.0, 9.0)))
    assert decision.use is Use.CUBLAS
    assert decision.candidate == only
    assert decision.speedup is not None
    assert decision.speedup.median == pytest.approx(9.0 / 9.3, abs=0.002)
    # All that is said is of the state in which it gains less.
    assert decision.statistics is not None
    assert decision.statistics.median_us == pytest.approx(9.3, rel=0.05)
    assert decision.baseline is not None
    assert decision.baseline.median_us == pytest.approx(9.0, rel=0.05)
    assert decision.conditions is not None
    assert decision.conditions.sm_clock_mhz == 1500


def test_what_is_told_of_rivals_and_spreads_is_the_winners_and_decides_nothing() -> None:
    slow, fast = named("slow"), named("fast")
    held = finals({slow: 10.5, fast: 10.0}, baseline=12.0)
    decision = decide(
        replace(
            held,
            rivals=(Rival(name="loop", samples_us=tuple(0.9 * us for us in held.samples_us[1])),),
            spreads=(
                InSpread(spread="balanced", times_us=(9.0, 9.5), default_us=13.0),
                InSpread(spread="very_skewed", times_us=(12.0, 10.5), default_us=11.0),
            ),
        )
    )
    assert (decision.candidate, decision.use) == (fast, Use.CUTLASS)
    (rival,) = decision.rivals
    assert rival.name == "loop"
    assert rival.speedup.median == pytest.approx(0.9)
    assert rival.median_us == pytest.approx(9.0, rel=0.05)
    assert decision.spreads == (
        OnSpread(spread="balanced", median_us=9.5, default_us=13.0),
        OnSpread(spread="very_skewed", median_us=10.5, default_us=11.0),
    )


@pytest.mark.parametrize(("rival_us", "use"), [(10.6, Use.CUTLASS), (10.0, Use.CUBLAS)])
def test_no_kernel_is_recommended_that_does_not_beat_what_any_program_has(
    rival_us: float, use: Use
) -> None:
    slow, fast = named("slow"), named("fast")
    held = finals({slow: 11.0, fast: 10.2}, baseline=12.0)
    samples = tuple(us * rival_us / 10.2 for us in held.samples_us[1])
    rival = Rival(name="torch.compile", samples_us=samples, is_to_be_beaten=True)
    decision = decide(replace(held, rivals=(rival,)))
    assert (decision.candidate, decision.use) == (fast, use)


def test_the_winner_is_fastest_between_the_states_of_what_gains_in_both() -> None:
    hot, both, steady = named("hot"), named("both"), named("steady")
    decision = decide(
        in_two_states(
            {hot: 8.0, both: 10.0, steady: 10.8},
            {hot: 9.5, both: 8.5, steady: 8.0},
            baselines=(11.0, 9.0),
        )
    )
    assert decision.candidate == both
    assert decision.use is Use.CUTLASS
    assert decision.speedup is not None
    assert decision.speedup.median == pytest.approx(9.0 / 8.5, abs=0.002)


def test_slower_in_one_state_and_not_faster_in_another_is_no_tie() -> None:
    """As on an H200: the median of all rounds pooled was of the state in which they are alike."""
    alike, fastest = named("alike"), named("fastest")
    decision = decide(
        in_two_states({alike: 10.4, fastest: 10.0}, {alike: 8.0, fastest: 8.0}, (11.0, 9.0))
    )
    assert decision.candidate == fastest
    assert decision.ties == ()
    level = decide(
        in_two_states({alike: 10.2, fastest: 10.0}, {alike: 8.0, fastest: 8.16}, (11.0, 9.0))
    )
    assert level.candidate == alike  # they are level, and the order of names is fixed
    assert level.ties == (fastest.key,)


def test_what_loses_between_other_kernels_is_not_recommended() -> None:
    """As on an H200: launches of one kernel overlap, those of a program's kernels do not."""
    fast, steady = named("fast"), named("steady")
    both = in_two_states({fast: 10.0, steady: 10.5}, {fast: 8.0, steady: 8.5}, (11.0, 9.0))
    assert decide(both).candidate == fast
    between = finals({fast: 11.5, steady: 10.7}, 11.0)
    decision = decide(replace(both, interleaved=between))
    assert decision.candidate == steady
    assert decision.use is Use.CUTLASS
    assert decision.speedup is not None
    assert decision.speedup.median == pytest.approx(11.0 / 10.7, abs=0.002)


def test_who_took_no_part_between_other_kernels_is_not_recommended() -> None:
    fast, slow = named("fast"), named("slow")
    both = in_two_states({fast: 10.0, slow: 10.5}, {fast: 8.0, slow: 8.5}, (11.0, 9.0))
    between = finals({fast: 11.2, slow: 10.0}, 11.0)
    between = replace(between, samples_us=(between.samples_us[0], ()))
    decision = decide(replace(both, interleaved=between))
    assert decision.use is Use.CUBLAS
    assert decision.candidate == fast  # by what both took part in
    assert decision.speedup is not None
    assert decision.speedup.median == pytest.approx(11.0 / 11.2, abs=0.002)


def test_what_costs_its_neighbours_more_than_it_gains_is_not_recommended() -> None:
    """As on an H200: faster in every round, and drawing so much power that all else pays."""
    fast, thrifty = named("fast"), named("thrifty")
    both = in_two_states({fast: 10.0, thrifty: 10.5}, {fast: 8.0, thrifty: 8.5}, (11.0, 9.0))
    dear = decide(replace(both, power_penalties=(1.12, 1.02)))
    assert dear.candidate == thrifty
    assert dear.use is Use.CUTLASS
    assert dear.power_penalty == 1.02
    assert decide(both).power_penalty is None
    # Both pay their power_penalty: the thrifty one is the better answer.
    assert decide(replace(both, power_penalties=(1.09, 1.0))).candidate == thrifty
    assert decide(replace(both, power_penalties=(1.03, 1.0))).candidate == fast
    neither = decide(replace(both, power_penalties=(1.12, 1.08)))
    assert neither.use is Use.CUBLAS
    assert neither.speedup is not None
    assert neither.speedup.median > 1.04  # what is reported is what was measured


def test_power_is_paid_for_between_the_states() -> None:
    """At the limit it gains most, and only there what it draws costs anything."""
    fast = named("fast")
    both = in_two_states({fast: 10.0}, {fast: 8.7}, (11.0, 9.0))  # 1.10 and 1.03
    assert decide(replace(both, power_penalties=(1.05,))).use is Use.CUTLASS
    assert decide(replace(both, power_penalties=(1.08,))).use is Use.CUBLAS
    behind = in_two_states({fast: 10.0}, {fast: 9.1}, (11.5, 9.0))
    assert decide(replace(behind, power_penalties=(1.0,))).use is Use.CUBLAS


def test_a_thrifty_kernel_must_be_faster_all_the_same() -> None:
    thrifty = named("thrifty")
    both = in_two_states({thrifty: 11.1}, {thrifty: 9.1}, (11.0, 9.0))
    assert decide(replace(both, power_penalties=(0.9,))).use is Use.CUBLAS


def test_whose_price_is_not_known_is_not_recommended() -> None:
    fast, slow = named("fast"), named("slow")
    both = in_two_states({fast: 10.0, slow: 10.5}, {fast: 8.0, slow: 8.5}, (11.0, 9.0))
    assert decide(replace(both, power_penalties=(None, 1.0))).candidate == slow
    assert decide(replace(both, power_penalties=(None, None))).use is Use.CUBLAS
    # The price is why cuBLAS stays, though the other kernel is as good as anyone knows.
    dear = decide(replace(both, power_penalties=(None, 1.5)))
    assert (dear.use, dear.candidate, dear.power_penalty) == (Use.CUBLAS, slow, 1.5)


def test_a_clear_winner_is_promoted_with_its_paired_speed_up() -> None:
    fast, slow = named("fast"), named("slow")
    decision = decide(finals({slow: 12.0, fast: 10.0}, baseline=11.0))
    assert decision.candidate == fast
    assert decision.use is Use.CUTLASS
    assert decision.ties == ()
    assert decision.speedup is not None
    # The 5% drift is common to a round: paired, 1.10 is told apart to a fraction of a percent.
    assert decision.speedup.median == pytest.approx(1.1, abs=0.002)
    assert decision.speedup.ci_low > 1.098


def test_cublas_stays_the_answer_when_it_is_faster() -> None:
    decision = decide(finals({named("only"): 10.0}, baseline=9.9))
    assert decision.use is Use.CUBLAS
    assert decision.candidate == named("only")  # kept, to show how close it came
    assert decision.speedup is not None
    assert decision.speedup.median < 1


def test_cublas_stays_the_answer_when_it_cannot_be_told_apart() -> None:
    assert decide(finals({named("a"): 10.0}, baseline=10.0, noise=0.02)).use is Use.CUBLAS


def test_inside_the_noise_the_fixed_order_decides() -> None:
    launch = Launch(decomposition=Decomposition.STREAM_K)
    streamed = replace(named("a-streams", TileScheduler.STREAM_K), launch=launch)
    plain_b, plain_c = named("b-plain"), named("c-plain")
    times = {plain_c: 10.0, streamed: 10.0, plain_b: 10.0}
    decision = decide(finals(times, baseline=12.0, noise=0.02))
    assert decision.candidate == plain_b  # deterministic first, then by name
    assert set(decision.ties) == {plain_c.key, streamed.key}


def test_the_order_of_the_finalists_does_not_matter() -> None:
    a, b = named("a"), named("b")
    one = finals({a: 10.0, b: 10.2}, baseline=11.0)
    swapped = replace(one, candidates=(b, a), samples_us=one.samples_us[::-1])
    assert decide(one) == decide(swapped)


def test_without_a_survivor_cublas_stays() -> None:
    decision = decide(finals({}, baseline=10.0))
    assert decision.candidate is None
    assert decision.use is Use.CUBLAS
    assert decision.baseline is not None


@pytest.mark.parametrize("baseline", [5.0, 10.0, 20.0])
def test_an_order_of_sums_is_never_served_by_the_default(baseline: float) -> None:
    """The default adds in no known order: the fastest candidate wins, whatever the ratio."""
    slow, fast = named("slow"), named("fast")
    problem = replace(PROBLEM, dtype="bf16.sum_sequential")
    held = replace(finals({slow: 11.0, fast: 10.0}, baseline), problem=problem)
    decision = decide(held)
    assert (decision.candidate, decision.use) == (fast, Use.CUTLASS)
    assert decision.speedup is not None
    assert decision.speedup.median == pytest.approx(baseline / 10.0, rel=0.01)
    rival = Rival(name="torch", samples_us=(1.0,) * 25, is_to_be_beaten=True)
    unpowered = replace(held, rivals=(rival,), power_penalties=(1.2, None))
    assert decide(unpowered).runs == fast
