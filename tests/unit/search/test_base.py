"""The kernels compiled ahead of time: who is elected, and that every family has its share."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from gemmsmith.core.kernel import Kernel
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import DType, Layout, Problem
from tests.unit.search.test_cost_model import H200
from tuner.backends import candidates
from tuner.compile.plan import cost, units
from tuner.exchange import read_winners
from tuner.search.base import BASE_CORE_SECONDS, DTYPES, base_kernels

WINNERS = Path(__file__).resolve().parents[3] / "configs" / "winners"


@pytest.fixture(scope="module")
def base() -> list[Kernel]:
    return base_kernels(H200)


def test_the_base_costs_what_it_may_and_has_every_family(base: list[Kernel]) -> None:
    assert len(base) == len({each.name for each in base})
    assert BASE_CORE_SECONDS * 0.9 < sum(map(cost, units(base, 16))) < BASE_CORE_SECONDS * 1.1
    shares = Counter((each.dtype, each.layout) for each in base)
    for dtype in DTYPES:
        for layout in (
            (Layout.TN,)
            if Operation.of(dtype).is_narrow_float
            else (Layout.TN, Layout.TT, Layout.NT)
        ):
            assert shares[dtype, layout] >= 25


def test_a_smaller_base_is_the_beginning_of_a_larger_one(base: list[Kernel]) -> None:
    assert (
        base_kernels(H200, [DType.FP8_E4M3], limit=20)
        == base_kernels(H200, [DType.FP8_E4M3], limit=40)[:20]
    )


@pytest.mark.parametrize("layout", [Layout.TN, Layout.TT, Layout.NT])
@pytest.mark.parametrize("sizes", [(37, 5120, 13824), (3000, 1280, 5120), (4096, 14336, 4096)])
def test_an_unseen_problem_has_enough_kernels_in_it(
    sizes: tuple[int, int, int], layout: Layout, base: list[Kernel]
) -> None:
    m, n, k = sizes
    if layout is Layout.NT:
        m = -(-m // 8) * 8  # M is contiguous there, and 37 of them is nothing that TMA reads
    problem = Problem(m=m, n=n, k=k, dtype=DType.BF16, layout=layout)
    legal = {each.kernel.name for each in candidates(problem, H200)}
    assert len(legal & {each.name for each in base}) >= 16


@pytest.mark.parametrize("gpu", ["nvidia-h100-80gb-hbm3-132sm", "nvidia-h200-132sm"])
def test_a_head_of_an_odd_vocabulary_has_a_kernel_in_each_pass(gpu: str) -> None:
    """Also where the shipped winners vote, as `gemmsmith kernels build` lets them."""
    winners = [each for file in sorted(WINNERS.glob(f"{gpu}*")) for each in read_winners(file)]
    names = {each.name for each in base_kernels(winners[0].device, winners=winners)}
    for dtype in (DType.BF16, DType.FP16):
        for layout, (m, n, k) in (
            (Layout.TN, (3600, 49159, 2048)),
            (Layout.TT, (3600, 2048, 49159)),
            (Layout.NT, (49159, 2048, 3600)),
        ):
            problem = Problem(m=m, n=n, k=k, dtype=dtype, layout=layout)
            assert names & {each.kernel.name for each in candidates(problem, H200)}
