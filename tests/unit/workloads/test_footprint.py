"""What a problem takes on the device, and which are refused."""

from __future__ import annotations

import pytest

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.problem import DType, Problem
from tuner.errors import DoesNotFit
from tuner.workloads.footprint import (
    MAX_SETS,
    check_fits,
    footprint,
    footprint_bytes,
    set_count,
)

H200 = DeviceModel(
    name="NVIDIA H200", arch="sm90", sm_count=132, memory_bytes=150_000_000_000, l2_bytes=62_914_560
)


@pytest.mark.parametrize(
    "shape", [(16, 4096, 4096), (128, 128, 16384), (256, 4096, 14336), (4096, 576, 7168)]
)
def test_the_sets_leave_the_cache_cold(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    problem = Problem(m=m, n=n, k=k)
    count = set_count(problem, H200)
    assert count * footprint(problem).one_set >= 3 * H200.l2_bytes
    assert (count - 1) * footprint(problem).one_set < 3 * H200.l2_bytes


def test_the_number_of_sets_is_bounded_at_both_ends() -> None:
    assert set_count(Problem(m=1, n=1, k=1), H200) == MAX_SETS
    assert set_count(Problem(m=8192, n=8192, k=8192), H200) == 1


def test_a_set_holds_each_operand_once() -> None:
    parts = footprint(Problem(m=128, n=256, k=512, batch=3, dtype=DType.FP8_E4M3))
    assert parts.a == 128 * 512 * 3
    assert parts.b == 256 * 512 * 3
    assert parts.d == 128 * 256 * 3 * 2


@pytest.mark.parametrize(
    "problem",
    [
        Problem(m=2**31 - 1, n=2**31 - 1, k=1),
        Problem(m=1, n=2**31 - 1, k=64),
        Problem(m=2**18, n=2**18, k=2**12),
        Problem(m=4096, n=4096, k=4096, batch=100_000),
    ],
)
def test_what_does_not_fit_is_refused_with_both_sizes(problem: Problem) -> None:
    with pytest.raises(DoesNotFit, match=r"GB of device memory.*has 150\.0 GB"):
        check_fits(problem, H200)


def test_large_real_layers_fit() -> None:
    for problem in (
        Problem(m=8192, n=128_256, k=8192),
        Problem(m=1, n=1, k=2**31 - 1),
        Problem(m=65_536, n=65_536, k=8192),
    ):
        check_fits(problem, H200)
        assert set_count(problem, H200) >= 1
        assert footprint_bytes(problem) < H200.memory_bytes
