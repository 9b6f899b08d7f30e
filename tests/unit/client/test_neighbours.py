"""The nearest problems, and which of their winners answers: the one rule of all three packages."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmsmith.core.config import MAX_DISTANCE, Use
from gemmsmith.core.neighbours import Neighbourhood, answering
from gemmsmith.core.problem import Problem
from tests.support.replacing import replace

extents = st.sampled_from([1, 2, 3, 7, 8, 9, 64, 96, 128, 4095, 4096, 2**31 - 1]) | st.integers(
    1, 2**14
)
problems = st.builds(Problem, m=extents, n=extents, k=extents, batch=st.sampled_from([1, 1, 2]))


@given(
    known=st.lists(problems, max_size=40, unique=True),
    asked=problems,
    limit=st.sampled_from([1, 2, 5, 64]),
    reach=st.sampled_from([0.0, 1.0, 1.6, 2.0, 40.0, math.inf]),
    seed=st.integers(0, 9),
)
def test_the_nearest_are_those_of_all(
    known: list[Problem], asked: Problem, limit: int, reach: float, seed: int
) -> None:
    orders = random.Random(seed).sample(range(len(known)), len(known))
    around = Neighbourhood[int]()
    for problem, order in zip(known, orders, strict=True):
        around.put(problem, order, -1)
        around.put(problem, order, order)  # in place of the first
    here = asked.log_extents
    expected = sorted(
        (sum((a - b) * (a - b) for a, b in zip(problem.log_extents, here, strict=True)), order)
        for problem, order in zip(known, orders, strict=True)
        if problem.batch == asked.batch
    )
    within = [order for square, order in expected if square <= reach * reach]
    near = around.nearest(asked, limit, reach)
    assert [order for _, order in near] == within[:limit]
    assert [problem for problem, _ in near] == [known[orders.index(order)] for _, order in near]
    assert around.count(asked) == len(expected)


def test_what_an_operation_fixes_is_never_another() -> None:
    """Grouped problems by rows differ in their number of tokens only."""
    here = Problem(m=512, n=4096, k=4096, batch=8, dtype="bf16.group_rows")
    longer = replace(here, m=1024)
    around = Neighbourhood[str]()
    for other in (longer, replace(here, n=4104), replace(here, batch=16)):
        around.put(other, 0, str(other))
    assert around.nearest(here, 9, math.inf) == [(longer, str(longer))]


@dataclass(frozen=True, kw_only=True)
class Won:
    use: Use = Use.CUTLASS
    kernel_name: str | None = "a"


HERE = Problem(m=2048, n=4096, k=4096, dtype="bf16.then_bias_gelu")
SMALL, LARGE = replace(HERE, m=1024), replace(HERE, m=4096)
A, B, DEFAULT = Won(), Won(kernel_name="b"), Won(use=Use.CUBLAS)


@pytest.mark.parametrize(
    ("near", "answer"),
    [
        ([], None),
        ([(SMALL, A)], (SMALL, Use.CUBLAS)),  # nothing larger
        ([(SMALL, A), (LARGE, A)], (SMALL, Use.CUTLASS)),
        ([(SMALL, A), (LARGE, B)], (SMALL, Use.CUBLAS)),  # not the same kernel
        ([(SMALL, A), (LARGE, DEFAULT)], (SMALL, Use.CUBLAS)),  # it did not win there
        ([(SMALL, A), (replace(HERE, m=8192), A)], (SMALL, Use.CUBLAS)),  # too far to be run
        ([(SMALL, A), (replace(LARGE, n=4000), A)], (SMALL, Use.CUBLAS)),  # not larger in N
        ([(SMALL, DEFAULT), (LARGE, A)], (SMALL, Use.CUBLAS)),
        ([(SMALL, Won(kernel_name="illegal")), (LARGE, A)], (LARGE, Use.CUBLAS)),
        ([(SMALL, Won(kernel_name="illegal"))], None),
        ([(replace(HERE, m=8192), A)], (replace(HERE, m=8192), Use.CUBLAS)),
        ([(replace(HERE, m=8200), A)], None),  # beyond MAX_DISTANCE
    ],
)
def test_who_answers_and_what_is_run(
    near: list[tuple[Problem, Won]], answer: tuple[Problem, Use] | None
) -> None:
    assert HERE.distance(replace(HERE, m=8192)) == MAX_DISTANCE
    found = answering(HERE, near, lambda won: won.kernel_name != "illegal")
    assert (found and (found[0], found[2])) == answer
    if found:
        assert found[:2] in near


ORDERED = Problem(m=512, n=4096, k=14336, dtype="bf16.sum_sequential")


@pytest.mark.parametrize(
    ("tuned", "legal", "asked", "answer"),
    [
        ([64, 512, 4096], None, 512, 512),
        ([64, 512, 4096], None, 513, 512),
        ([64, 512, 4096], None, 4095, 512),
        ([64, 512, 4096], None, 2**31 - 1, 4096),
        ([64, 512, 4096], None, 63, 64),  # nothing below: the fewest above
        ([64, 512, 4096], None, 1, 64),
        ([1], None, 2**20, 1),  # no distance is too far
        ([64, 512, 4096], [64, 4096], 600, 64),
        ([64, 512, 4096], [4096], 600, 4096),
        ([64, 512, 4096], [], 600, None),
        ([], [], 600, None),
    ],
)
@pytest.mark.parametrize(
    ("extent", "of_weight"),
    [
        ("m", ORDERED),
        ("k", replace(ORDERED, layout="nt")),
        ("m", replace(ORDERED, batch=8, dtype="bf16.group_rows.sum_sequential")),
        ("m", replace(ORDERED, batch=8, dtype="bf16.group_rows.then_silu_gate.sum_sequential")),
        ("k", replace(ORDERED, batch=8, dtype="bf16.group_depth.sum_sequential", layout="nt")),
    ],
)
def test_an_order_is_answered_at_every_number_of_tokens(
    extent: str,
    of_weight: Problem,
    tuned: list[int],
    legal: list[int] | None,
    asked: int,
    answer: int | None,
) -> None:
    here = replace(of_weight, **{extent: asked})
    around = Neighbourhood[Won]()
    for order, tokens in enumerate(tuned):
        around.put(replace(of_weight, **{extent: tokens}), order, Won(kernel_name=str(tokens)))
    near = around.nearest(here, 1, MAX_DISTANCE)
    found = answering(here, near, lambda won: legal is None or int(won.kernel_name or 0) in legal)
    assert (found and getattr(found[0], extent)) == answer
    if found:
        assert found[2] is Use.CUTLASS


@pytest.mark.parametrize(
    ("tuned", "illegal", "answer"),
    [
        # The nearest, of any number of tokens.
        (["512 4096 7168", "512 64 64"], "", "512 4096 7168"),
        (["64 4096 7168", "512 2048 14336", "4096 4096 14328"], "", "512 2048 14336"),
        (["1 8 8"], "", "1 8 8"),  # no distance is too far
        # Never before the same weight.
        (["1 4096 14336", "512 4096 14328"], "", "1 4096 14336"),
        (["1 4096 14336", "512 4096 14328"], "1 4096 14336", "512 4096 14328"),
        # A batch of as many before another, and another before none.
        (["2 512 4096 14336", "1 8 8"], "", "1 8 8"),
        (["2 512 4096 14336"], "", "2 512 4096 14336"),
        (["512 4096 7168", "1 8 8"], "512 4096 7168", "1 8 8"),
        (["1 8 8"], "1 8 8", None),
    ],
)
def test_another_weight_answers_for_an_order(
    tuned: list[str], illegal: str, answer: str | None
) -> None:
    around = Neighbourhood[Won]()
    for order, text in enumerate(tuned):
        *batch, m, n, k = map(int, text.split())
        other = replace(ORDERED, m=m, n=n, k=k, batch=batch[0] if batch else 1)
        around.put(other, order, Won(kernel_name=text))
        for dtype in (
            "bf16",
            "bf16.sum_mma",
            "fp16.sum_sequential",
            "bf16.then_bias.sum_sequential",
        ):
            around.put(replace(ORDERED, dtype=dtype), order, Won(kernel_name="another class"))
    near = around.nearest(ORDERED, 1, MAX_DISTANCE)
    found = answering(ORDERED, near, lambda won: won.kernel_name != illegal)
    assert (found and found[1].kernel_name) == answer
    if found:
        assert found[2] is Use.CUTLASS


def test_a_default_never_answers_for_an_order() -> None:
    near = [(replace(ORDERED, m=256), DEFAULT), (replace(ORDERED, m=8), A)]
    assert answering(ORDERED, near, lambda _: True) == (*near[1], Use.CUTLASS)


def test_a_plain_products_neighbour_answers_and_is_not_run() -> None:
    here = replace(HERE, dtype="bf16")
    near = [(replace(there, dtype="bf16"), A) for there in (SMALL, LARGE)]
    assert answering(here, near, lambda _: True) == (*near[0], Use.CUBLAS)
