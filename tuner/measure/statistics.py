"""Medians and their bootstrap confidence intervals, in plain Python.

The bootstrap distribution of a median is known in closed form: resampling n sorted values with
replacement, the median lies at or below the j-th exactly when at least half of the n draws do,
which is a binomial tail (Efron 1979, "Bootstrap methods: another look at the jackknife", section
3). The intervals here are those percentiles, what a bootstrap by simulation approaches with ever
more resamples. So they need no random numbers: the same samples always give the same interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import comb
from statistics import median

from gemmsmith.answers.answer import Ratio, Statistics

CONFIDENCE = 0.95


def summarize(samples: Sequence[float]) -> Statistics:
    """Median and 95% bootstrap interval of times in microseconds.

    Raises:
        ValueError: no samples.
    """
    low, high = median_interval(samples)
    return Statistics(
        median_us=median(samples), ci_low_us=low, ci_high_us=high, samples=len(samples)
    )


def paired_ratio(reference: Sequence[float], samples: Sequence[float]) -> Ratio:
    """Median and 95% bootstrap interval of reference[r] / samples[r] over rounds r.

    Above 1: `samples` is faster than `reference`.

    Raises:
        ValueError: no rounds, or sequences of different lengths.
    """
    ratios = [b / s for b, s in zip(reference, samples, strict=True)]
    low, high = median_interval(ratios)
    return Ratio(median=median(ratios), ci_low=low, ci_high=high)


def median_interval(samples: Sequence[float]) -> tuple[float, float]:
    """The 95% bootstrap interval of the median.

    Raises:
        ValueError: no samples.
    """
    if not samples:
        raise ValueError("no samples to summarize")
    ordered = sorted(samples)
    low, high = _percentile_ranks(len(ordered))
    # Of an even number of samples, from the lower median's bound to the upper median's: at least as
    # wide as the exact interval.
    return ordered[low], ordered[high]


@lru_cache(maxsize=256)
def _percentile_ranks(n: int) -> tuple[int, int]:
    """Ranks (0-based) of the bootstrap percentiles of the median of n samples."""
    tail = (1 - CONFIDENCE) / 2
    # The median of n draws is at or below a value if so many draws are: for an even n, first the
    # lower and then the upper of the two in the middle.
    lower, upper = (n + 1) // 2, n // 2 + 1
    low = next(j for j in range(n) if _at_or_below(n, j, lower) >= tail)
    high = next(j for j in range(n) if _at_or_below(n, j, upper) >= 1 - tail)
    return low, high


def _at_or_below(n: int, rank: int, needed: int) -> float:
    """P(at least `needed` of n draws have a rank of `rank` or less)."""
    p = (rank + 1) / n
    return sum(comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(needed, n + 1))
