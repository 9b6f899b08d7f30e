"""FP8 products scaled by rows and columns on winners: torch's own operator under `patch`.

The reference is FP64. What needs no CUDA runs on the host with stand-in kernels:
tests/unit/ops/test_scaling.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

import gemmsmith
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import MainloopSchedule, TileScheduler, cutlass
from gemmsmith.core.problem import DType, Problem
from tests.gpu.support.choosing import Ground, tuned
from tuner.backends import kernels

CASES = 100
DTYPE = "fp8_e4m3.scale_row"
BOUND = 1.5e-2
"""Relative error in the Frobenius norm: rounding to bf16, and sums in the tensor core."""
KINDS = (
    (MainloopSchedule.PINGPONG, TileScheduler.PERSISTENT, True),
    (MainloopSchedule.COOPERATIVE, TileScheduler.PERSISTENT, False),
    (MainloopSchedule.COOPERATIVE, TileScheduler.PERSISTENT, True),
    (MainloopSchedule.WARP_SPECIALIZED, TileScheduler.CLUSTER_SPLIT_K, True),
)
"""Mainloop, scheduler, and whether sums stay in the tensor core."""


@pytest.fixture(scope="module")
def ground(model: DeviceModel) -> Ground:
    found = [cutlass(one) for one in kernels(Problem(m=4096, n=768, k=1024, dtype=DTYPE))]
    chosen = [
        next(one for one in found if (one.mainloop, one.scheduler, one.fast_accumulation) == kind)
        for kind in KINDS
    ]
    compilers = ({"mode": "default"}, {"mode": "reduce-overhead"})
    return Ground.of(model, chosen, (DType.FP8_E4M3,), compilers=compilers)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(20261125)


def drawn(m: int, n: int, k: int) -> tuple[torch.Tensor, ...]:
    """A, B, and the factors of both."""
    a, b = (torch.randn(size, k, device="cuda").to(torch.float8_e4m3fn) for size in (m, n))
    rows, columns = torch.rand(m, 1, device="cuda"), torch.rand(1, n, device="cuda")
    return a, b.t(), rows + 0.5, columns + 0.5


def close(ours: torch.Tensor, wanted: torch.Tensor, bound: float = BOUND) -> None:
    assert ours.dtype is torch.bfloat16
    difference = torch.linalg.vector_norm(ours.double() - wanted.double())
    assert difference <= bound * torch.linalg.vector_norm(wanted.double())


def test_100_random_sizes_against_fp64(
    ground: Ground, record_property: Callable[[str, object], None]
) -> None:
    chance = random.Random(20261125)
    launched_ones = 0
    for _ in range(CASES):
        m, n, k = (16 * chance.randint(1, ground.largest // 16) for _ in range(3))
        fast = chance.random() < 0.7
        if fast:  # kernels take any number of rows, cuBLAS does not
            m = round(ground.largest ** chance.random())
        a, b, scale_a, scale_b = drawn(m, n, k)
        with tuned(ground) as launched, gemmsmith.patch():
            out = torch._scaled_mm(
                a, b, scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast
            )
            count = launched()
        close(out, (a.double() @ b.double()) * scale_a * scale_b)
        winner = ground.config(Problem(m=m, n=n, k=k, dtype=DTYPE))
        ours = winner is not None and (fast or not winner.kernel.keeps_short_sums)
        assert count == (1 if ours else 0)
        launched_ones += count
    record_property("by_tuned_kernels", launched_ones)
    assert launched_ones > CASES / 2


def test_what_torch_gives(ground: Ground) -> None:
    m, n, k = ground.sizes
    a, b, scale_a, scale_b = drawn(m, n, k)
    how = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
    expected = torch._scaled_mm(a, b, scale_a, scale_b, **how)
    into = torch.empty_like(expected)
    with tuned(ground) as launched, gemmsmith.patch():
        found = torch._scaled_mm(a, b, scale_a, scale_b, **how)
        torch._scaled_mm(a, b, scale_a, scale_b, **how, out=into)
        assert launched() == 2
    close(found, expected, 2 * BOUND)
    assert torch.equal(found, into)
    with tuned(ground) as launched:
        assert torch.equal(gemmsmith.scaled_mm(a, b, scale_a, scale_b, use_fast_accum=True), found)
        assert launched() == 1


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # inductor's own
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's
def test_compiled_and_in_a_graph(ground: Ground) -> None:
    """A layer that casts by rows, as torchao's does; its casts are fused as ever."""
    m, n, k = ground.sizes
    x, weight = (torch.randn(size, k, device="cuda").bfloat16() for size in (m, n))

    def cast(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = values.abs().amax(1, keepdim=True).float() / 448
        return (values / scale).to(torch.float8_e4m3fn), scale

    def layer(values: torch.Tensor) -> torch.Tensor:
        (a, scale_a), (b, scale_b) = cast(values), cast(weight)
        return torch._scaled_mm(
            a, b.t(), scale_a, scale_b.t(), out_dtype=torch.bfloat16, use_fast_accum=True
        )

    expected = layer(x)
    for compiler in ground.compilers:
        with tuned(ground) as launched, gemmsmith.patch():
            compiled = torch.compile(layer, fullgraph=True, dynamic=False, **compiler)
            for _ in range(3):
                close(compiled(x).clone(), expected, 2 * BOUND)
            assert launched() >= 1
