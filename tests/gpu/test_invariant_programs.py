"""Products of a program under `numerics="invariant"`: a row's bits in every call, size and place.

The winners are of one weight and one layout, another kernel for each range of M.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import gemmsmith
from gemmsmith import Snapshot, Use
from gemmsmith.answers.snapshot import Row
from gemmsmith.core.config import Config
from gemmsmith.core.problem import Problem
from gemmsmith.ops.engine.in_use import install
from gemmsmith.ops.engine.source import local_model
from tests.gpu.test_order import built, chosen, one_slice
from tests.support.serving import own_signer
from tuner.backends import refusal

__all__ = ["built"]

M, N, K = 1000, 1024, 4096
BF16 = torch.bfloat16


class Files:
    def __init__(self, paths: dict[str, Path]) -> None:
        self._by_hash = {path.stem: path for path in paths.values()}

    def path(self, pack_hash: str) -> Path:
        return self._by_hash[pack_hash]


@pytest.fixture
def invariant(built: dict[str, Path]) -> Iterator[None]:
    rows = []
    for kernel in chosen("bf16"):
        problem = Problem(2 ** len(rows), 4096, 4096, dtype="bf16.sum_sequential")
        if refusal(kernel, problem) is None:
            config = Config(kernel=kernel, launch=one_slice(kernel), pack=built[kernel.name].stem)
            rows.append(Row(problem=problem, use=Use.CUTLASS, config=config, deterministic=True))
    assert len(rows) > 4
    before = install(None)
    gemmsmith.use((Snapshot.of(str(local_model()), rows, own_signer()), Files(built)))
    with gemmsmith.patch(numerics="invariant"):
        yield
    install(before)
    torch._dynamo.reset()


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(41)
    return torch.randn(M, K, device="cuda", dtype=BF16)


@pytest.fixture
def w() -> torch.Tensor:
    torch.manual_seed(42)
    return torch.randn(N, K, device="cuda", dtype=BF16) * K**-0.5


def calls(x: torch.Tensor, w: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    """Ways to compute all of x · wᵀ, or its first rows or columns."""
    wide = torch.empty(len(x), 2 * K, device="cuda", dtype=BF16)[:, ::2].copy_(x)
    moved = torch.empty(x.numel() + 1, device="cuda", dtype=BF16)[1:].view_as(x).copy_(x)
    zeros = torch.zeros(len(x), N, device="cuda", dtype=BF16)
    return {
        "linear": lambda: functional.linear(x, w),
        "mm": lambda: torch.mm(x, w.t()),
        "mm of a turned weight": lambda: x @ w.t().contiguous(),
        "out": lambda: torch.mm(x, w.t(), out=torch.empty_like(zeros.t()).t()),
        "bmm": lambda: torch.bmm(x.expand(2, *x.shape), w.t().expand(2, K, N))[1],
        "addmm in place": lambda: zeros.clone().addmm_(x, w.t()),
        "every other column": lambda: functional.linear(wide, w),
        "an address off the alignment": lambda: functional.linear(moved, w),
        "a turned input": lambda: functional.linear(x.t().contiguous().t(), w),
        "rows off the alignment": lambda: functional.linear(
            functional.pad(x, (0, 1))[:, :-1], functional.pad(w, (0, 1))[:, :-1]
        ),
        "fewer columns": lambda: functional.linear(x, w[:77]),
        "a vector": lambda: (x @ w[0])[:, None],
        "a row": lambda: (x[0] @ w.t())[None],
        "dot": lambda: torch.dot(x[0], w[0]).reshape(1, 1),
        "one row at a time": lambda: torch.cat([functional.linear(row[None], w) for row in x[:9]]),
        "compiled": lambda: torch.compile(functional.linear)(x, w),
        "compiled for one row": lambda: torch.compile(functional.linear, mode="max-autotune")(
            x[:1], w
        ),
    }


@pytest.mark.usefixtures("invariant")
def test_every_call_gives_a_row_the_same_bits(x: torch.Tensor, w: torch.Tensor) -> None:
    whole = functional.linear(x, w)
    torch.testing.assert_close(whole.float(), x.float() @ w.float().t(), atol=0.05, rtol=0.02)
    for m in (1, 2, 5, 16, 33, 64, 130, 500, M):
        for name, act in calls(x[:m], w).items():
            part = act()
            rows, columns = part.shape
            assert torch.equal(part, whole[:rows, :columns]), f"{name} at {m} rows"


@pytest.mark.usefixtures("invariant")
@pytest.mark.parametrize("k", [1, 7, 63, 100, 1000, 4001, 4090])
def test_zeros_after_k_keep_the_bits(x: torch.Tensor, w: torch.Tensor, k: int) -> None:
    """What `gemmsmith.ops.engine.copying` assumes of the tensor cores."""
    short = functional.linear(x[:, :k], w[:, :k])
    for missing in (-k % 8, -k % 64 + 64, K - k):
        longer = (functional.pad(tensor[:, :k], (0, missing)) for tensor in (x, w))
        assert torch.equal(functional.linear(*longer), short), f"{missing} zeros"


@pytest.mark.usefixtures("invariant")
def test_gradients_of_inputs_have_the_bits_of_a_product(x: torch.Tensor, w: torch.Tensor) -> None:
    dy = torch.randn(M, N, device="cuda", dtype=BF16)
    whole = dy @ w
    for m in (1, 3, 64, M):
        rows = x[:m].clone().requires_grad_()
        functional.linear(rows, w).backward(dy[:m])
        assert torch.equal(rows.grad if rows.grad is not None else x, whole[:m])


@pytest.mark.usefixtures("invariant")
def test_graphs_replay_the_bits(x: torch.Tensor, w: torch.Tensor) -> None:
    wide = torch.empty(64, 2 * K, device="cuda", dtype=BF16)[:, ::2]
    whole = functional.linear(x[:64], w)
    functional.linear(wide, w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = functional.linear(wide, w)
    wide.copy_(x[:64])
    graph.replay()
    assert torch.equal(captured, whole)
    new = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="run the model once before"), torch.cuda.graph(new):
        functional.linear(wide[:3], w)
