"""Operations beside the plain float ones: which have kernels, of what types and names."""

from __future__ import annotations

import pytest

from gemmsmith.device import DeviceModel
from gemmsmith.kernel import TileScheduler, cutlass
from gemmsmith.problem import Problem
from tuner.backends import candidates, kernels, offered, refusal


def problem(dtype: str, layout: str = "tn", m: int = 512, n: int = 1024, k: int = 2048) -> Problem:
    return Problem(m=m, n=n, k=k, dtype=dtype, layout=layout)


@pytest.mark.parametrize("dtype", ["bf16.out_f32", "fp16.out_f32"])
@pytest.mark.parametrize("layout", ["nt", "tn", "tt", "nn"])
def test_adding_to_d_takes_the_kernels_that_do_not(
    dtype: str, layout: str, h200: DeviceModel
) -> None:
    plain, adding = problem(dtype, layout), problem(f"{dtype}.accumulate", layout)
    assert kernels(adding) == kernels(plain)
    assert offered(adding, h200) == offered(plain, h200)
    assert candidates(adding, h200) == candidates(plain, h200)
    for kernel in offered(adding, h200):
        assert kernel.dtype == dtype
        assert refusal(kernel, adding) is None


def test_kernels_that_add_slices_are_told_apart_by_d() -> None:
    names = [
        {
            kernel.name
            for kernel in kernels(problem(dtype))
            if cutlass(kernel).scheduler is TileScheduler.SPLIT_K
        }
        for dtype in ("bf16", "bf16.out_f32")
    ]
    assert all(names)
    assert names[0].isdisjoint(names[1])
