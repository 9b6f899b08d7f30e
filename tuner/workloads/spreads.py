"""How tokens are distributed over the groups of a grouped problem; plain arithmetic without torch.

The tokens of an expert vary from step to step while their total does not. A kernel that wins with
equal groups may lose if one group is large and many are empty. So every grouped problem is drawn in
three spreads, and in several draws of each. A draw depends on the problem's extents and its own
number only, so all candidates get the same groups, also in later runs.
"""

from __future__ import annotations

import random
from enum import StrEnum
from functools import lru_cache
from itertools import accumulate, pairwise
from statistics import fmean

from gemmsmith.core.operation import Grouping
from gemmsmith.core.problem import Problem

TMA_BYTES = 16
"""TMA reads from addresses that are multiples of this many bytes."""

HOT_SHARE = 0.3
"""Share of the tokens that a very skewed draw adds to one group."""


_COUNTED_DRAWS = 8
"""Draws of each spread that `groups_read` counts."""


class Spread(StrEnum):
    """A distribution of tokens over groups."""

    BALANCED = "balanced"  # equal groups, as far as the total allows
    SKEWED = "skewed"  # shares from a Dirichlet distribution with parameter 2
    VERY_SKEWED = "very_skewed"  # with parameter 0.5; a quarter of the groups empty, one large


def ends_of(problem: Problem, spread: Spread, draw: int) -> tuple[int, ...]:
    """The offset at which each group's tokens end; the last group ends with the last token."""
    tokens, groups = tokens_of(problem), problem.batch
    step = run_multiple(problem)
    units = -(-tokens // step)
    if spread is Spread.BALANCED:
        # With fewer tokens than groups, every draw gives them to other groups.
        before = units * draw // groups
        ends = [units * (group + 1 + draw) // groups - before for group in range(groups)]
    else:
        source = random.Random(f"{spread} {draw}")  # noqa: S311 - a draw, not a secret
        ends = _divided(_weights(spread, groups, source), units, source)
    return tuple(min(tokens, step * end) for end in ends)


def short_ends(problem: Problem, seed: int) -> tuple[int, ...]:
    """Ends of skewed groups after which some tokens are left over, as in padded buffers."""
    # For verification only, so they depend on the seed.
    step = run_multiple(problem)
    units = tokens_of(problem) // step
    source = random.Random(seed)  # noqa: S311 - a draw, not a secret
    weights = _weights(Spread.SKEWED, problem.batch, source)
    ends = _divided(weights, max(0, units - 1 - units // 8), source)
    return tuple(step * end for end in ends)


def runs_of(problem: Problem, spread: Spread, draw: int) -> list[int]:
    """The number of tokens of each group."""
    return [stop - start for start, stop in pairwise((0, *ends_of(problem, spread, draw)))]


@lru_cache(maxsize=4096)
def groups_read(problem: Problem) -> float:
    """How many groups have tokens in a launch, on average over the draws of all spreads."""
    return fmean(
        sum(run > 0 for run in runs_of(problem, spread, draw))
        for spread in Spread
        for draw in range(_COUNTED_DRAWS)
    )


def tokens_of(problem: Problem) -> int:
    return problem.m if problem.operation.grouping is Grouping.ROWS else problem.k


def run_multiple(problem: Problem) -> int:
    """The multiple of tokens at which groups start. 1, unless TMA reads along the tokens."""
    operation = problem.operation
    if operation.grouping is Grouping.DEPTH and operation.layout.is_k_major:
        return TMA_BYTES // operation.a.bytes
    return 1


def _weights(spread: Spread, groups: int, source: random.Random) -> list[float]:
    if spread is Spread.SKEWED:
        return [source.gammavariate(2.0, 1.0) for _ in range(groups)]
    # Independent gamma samples, divided by their sum, are a sample of a Dirichlet distribution.
    weights = [source.gammavariate(0.5, 1.0) for _ in range(groups)]
    hot, *empty = source.sample(range(groups), 1 + groups // 4)
    for group in empty:
        weights[group] = 0.0
    weights[hot] += sum(weights) * HOT_SHARE / (1 - HOT_SHARE)
    return weights


def _divided(weights: list[float], units: int, source: random.Random) -> list[int]:
    """Ends of groups in proportion to the weights, rounded with a random phase."""
    sums = list(accumulate(weights))
    phase = source.random()
    return [int(units * (part / sums[-1]) + phase) for part in sums]
