"""How tokens spread over groups."""

from __future__ import annotations

import pytest

from tests.support.grouped import DEPTH, FP8, ROWS, problem_of
from tuner.workloads.spreads import HOT_SHARE, Spread, ends_of, short_ends

TOKENS = [(96, 5), (1, 4), (64, 1), (3, 32), (1, 1)]


@pytest.mark.parametrize(("tokens", "groups"), [*TOKENS, (131072, 128), (4096, 8)])
def test_every_spread_divides_all_tokens(tokens: int, groups: int) -> None:
    for dtype, layout in (ROWS[0], DEPTH[0], FP8[1]):
        problem = problem_of(dtype, layout, tokens, groups)
        multiple = 16 if (dtype, layout) == FP8[1] else 1
        for spread in Spread:
            for draw in range(4):
                ends = ends_of(problem, spread, draw)
                assert ends == ends_of(problem, spread, draw)
                assert len(ends) == groups
                assert list(ends) == sorted(ends)
                assert ends[-1] == tokens
                assert all(end % multiple == 0 or end == tokens for end in ends)
        ends = short_ends(problem, seed=draw)
        assert list(ends) == sorted(ends)
        assert 0 <= ends[-1] < tokens
        assert all(end % multiple == 0 for end in ends)


def test_the_spreads_are_what_their_names_say() -> None:
    problem = problem_of("bf16.group_rows", "tn", 16384, 128)
    for draw in range(5):
        sizes = {
            spread: [b - a for a, b in zip((0, *ends), ends, strict=False)]
            for spread in Spread
            for ends in [ends_of(problem, spread, draw)]
        }
        assert set(sizes[Spread.BALANCED]) == {128}
        assert 2 * 128 < max(sizes[Spread.SKEWED]) < 0.1 * 16384
        assert sizes[Spread.VERY_SKEWED].count(0) >= 32
        assert max(sizes[Spread.VERY_SKEWED]) >= HOT_SHARE * 16384
    assert ends_of(problem, Spread.SKEWED, 0) != ends_of(problem, Spread.SKEWED, 1)
