"""The closed-form bootstrap against a simulated one, and its edges."""

from __future__ import annotations

import random
import time
from statistics import median

import pytest

from tuner.measure.statistics import median_interval, paired_ratio, summarize


@pytest.mark.parametrize("n", [5, 7, 25, 51])
def test_the_closed_form_is_what_resampling_approaches(n: int) -> None:
    rng = random.Random(n)
    samples = sorted(rng.gauss(100, 3) for _ in range(n))
    medians = sorted(median(rng.choices(samples, k=n)) for _ in range(20_000))
    low, high = median_interval(samples)
    rank = {value: i for i, value in enumerate(samples)}
    assert abs(rank[low] - rank[medians[500]]) <= 1
    assert abs(rank[high] - rank[medians[19_500]]) <= 1


def test_coverage_is_near_95_percent() -> None:
    rng = random.Random(1)
    covered = 0
    for _ in range(2000):
        low, high = median_interval([rng.gauss(0, 1) for _ in range(25)])
        covered += low <= 0 <= high
    assert 0.92 <= covered / 2000 <= 0.99


def test_even_counts_and_single_samples() -> None:
    one = summarize([5.0])
    assert (one.median_us, one.ci_low_us, one.ci_high_us, one.samples) == (5.0, 5.0, 5.0, 1)
    two = summarize([1.0, 3.0])
    assert (two.median_us, two.ci_low_us, two.ci_high_us) == (2.0, 1.0, 3.0)
    low, high = median_interval(range(26))
    assert low == 25 - high
    with pytest.raises(ValueError, match="no samples"):
        summarize([])


def test_ratios_are_paired_by_round() -> None:
    # Both drift twofold over the run; their ratio does not.
    baseline = [10.0 + i for i in range(11)]
    ratio = paired_ratio(baseline, [b / 1.25 for b in baseline])
    assert ratio.median == pytest.approx(1.25)
    assert ratio.ci_low == pytest.approx(1.25)
    with pytest.raises(ValueError, match="zip"):
        paired_ratio([1.0], [1.0, 2.0])


def test_the_same_samples_give_the_same_interval_whatever_their_order() -> None:
    samples = [random.Random(3).random() for _ in range(25)]
    assert median_interval(samples) == median_interval(sorted(samples, reverse=True))


def test_it_is_quick() -> None:
    samples = [random.Random(4).random() for _ in range(25)]
    summarize(samples)
    began = time.process_time()
    for _ in range(100):
        summarize(samples)
    assert time.process_time() - began < 0.2
