"""What commands say of what they found: which is served, and how a problem is typed."""

from __future__ import annotations

import shlex

import pytest

from gemmsmith.problem import Problem
from service.cli.options import typed
from service.cli.tasks import not_served
from tests.support.replacing import replace
from tests.support.serving import winner

PROBLEM = Problem(m=256, n=4096, k=4096)
MEASURED = replace(winner(PROBLEM), revision=1)


@pytest.mark.parametrize(
    ("served", "said"),
    [
        (None, ""),
        (replace(MEASURED, revision=2), ""),
        (MEASURED, "kept as revision 2; revision 1, which a GPU has measured, stays served"),
        (
            replace(MEASURED, pinned=True, replayed=True),
            "kept as revision 2; revision 1, which is pinned, stays served",
        ),
    ],
)
def test_a_winner_that_is_not_served_is_told_apart(served: object, said: str) -> None:
    assert not_served(2, served) == said  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (PROBLEM, "256 4096 4096 --dtype bf16 --layout tn"),
        (
            Problem.parse("8x256x4096x4096 bf16.group_rows tt"),
            "256 4096 4096 --dtype bf16.group_rows --layout tt --batch 8",
        ),
    ],
)
def test_a_problem_is_typed_whole(problem: Problem, words: str) -> None:
    assert shlex.split(typed(problem)) == words.split()
