"""Mixtures of experts on winners: torch's own grouped products under `gemmsmith.patch`.

The reference is FP64, group by group. What needs no CUDA runs on the host as well, with stand-in
kernels: tests/unit/ops/test_grouped_training.py.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
import torch

import gemmsmith
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import DType, Problem
from tests.gpu.support.choosing import Ground, first_kernels, tuned
from tests.gpu.support.layers import close

CASES = 300
EXPERTS = (1, 3, 8, 64, 128)
BOUND = 1e-2
"""Relative error in the Frobenius norm: rounding of a result in bf16."""
SCALED_BOUND = 1.5e-2
"""And FP8's sums in the tensor core."""
LARGEST = 2**28
"""Elements of all experts' weights: their gradient's reference takes 2 GiB."""
SLICE = 16
"""FP8 operands of a weight's gradient are cut where 16 bytes begin."""

OPERATIONS = (
    Operation.of("bf16", "tn", grouping="rows"),
    Operation.of("bf16", "tt", grouping="rows"),
    Operation.of("bf16", "nt", grouping="depth"),
    Operation.of("fp8_e4m3", "tn", scaling="row", grouping="rows"),
)


@pytest.fixture(scope="module")
def ground(model: DeviceModel) -> Ground:
    problems = [Problem.of(operation, 4096, 768, 1024, 16) for operation in OPERATIONS]
    types = (DType.BF16, DType.FP8_E4M3)
    return Ground.of(model, first_kernels(problems), types, compilers=())


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(20261123)


def cut(chance: random.Random, experts: int, tokens: int, step: int = 1) -> list[int]:
    """Where the experts' tokens end: evenly, unevenly, all with one, or before the last token."""
    kind = chance.choice(("even", "uneven", "one", "short"))
    weights = [1.0 if kind == "even" else chance.random() ** 4 + 1e-9 for _ in range(experts)]
    if kind == "one":
        weights = [float(expert == experts // 2) for expert in range(experts)]
    last = tokens // 2 if kind == "short" else tokens
    total = sum(weights)
    return [int(last * run / total) // step * step for run in itertools.accumulate(weights)]


def groups(ends: list[int]) -> list[slice]:
    return [slice(*pair) for pair in itertools.pairwise([0, *ends])]


def by_rows(a: torch.Tensor, b: torch.Tensor, ends: list[int]) -> torch.Tensor:
    found = [a[rows].double() @ b[g].double() for g, rows in enumerate(groups(ends))]
    return torch.cat(found)


def by_depth(a: torch.Tensor, b: torch.Tensor, ends: list[int]) -> torch.Tensor:
    return torch.stack([a[:, run].double() @ b[run].double() for run in groups(ends)])


def offsets(ground: Ground, ends: list[int]) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32, device=ground.device)


def leaf(ground: Ground, *size: int, turned: bool = False) -> torch.Tensor:
    values = torch.randn(size, device=ground.device).bfloat16()
    return (values.mT if turned else values).requires_grad_()


def extent(chance: random.Random, ground: Ground) -> int:
    return -(-round(ground.largest ** chance.random()) // 16) * 16


def test_300_random_mixtures_against_torch(
    ground: Ground, record_property: Callable[[str, object], None]
) -> None:
    """Forwards and backwards, in both layouts of the weights, by a kernel or by torch."""
    chance = random.Random(20261123)
    launched_ones = 0
    for _ in range(CASES):
        experts = chance.choice(EXPERTS)
        tokens = round((8 * ground.largest) ** chance.random())
        n, k = extent(chance, ground), extent(chance, ground)
        experts = min(experts, max(1, LARGEST // (n * k)))
        x = leaf(ground, tokens, k)
        w = leaf(ground, experts, n, k, turned=True)
        if chance.random() < 0.5:
            w = leaf(ground, experts, k, n)
        ends = cut(chance, experts, tokens)
        offs, dy = offsets(ground, ends), torch.randn(tokens, n, device=ground.device).bfloat16()
        theirs = torch._grouped_mm(x, w, offs=offs)
        theirs_by = torch.autograd.grad(theirs, (x, w), dy)
        with tuned(ground) as launched, gemmsmith.patch():
            out = torch._grouped_mm(x, w, offs=offs)
            dx, dw = torch.autograd.grad(out, (x, w), dy)
            launched_ones += launched()
        last = ends[-1]
        assert (out.dtype, out.stride()) == (theirs.dtype, theirs.stride())
        wanted = (
            by_rows(x.detach(), w.detach(), ends),
            by_rows(dy, w.detach().mT, ends),
            by_depth(x.detach().t(), dy, ends),
        )
        by_torch = (theirs[:last], theirs_by[0][:last], theirs_by[1])
        for mine, his, exact in zip((out[:last], dx[:last], dw), by_torch, wanted, strict=True):
            close(mine, exact, BOUND)
            close(mine, his.detach().double(), 2 * BOUND)
    record_property("by_tuned_kernels", launched_ones)
    assert launched_ones > CASES * 3 / 2


def test_scaled_mixtures(ground: Ground) -> None:
    """By rows with kernels of ours; by depth there are none, and torch's runs."""
    chance = random.Random(20261124)
    launched_ones = 0
    for _ in range(CASES // 10):
        experts, tokens = chance.choice((1, 3, 8, 32)), 16 * chance.randint(1, ground.largest // 16)
        n, k = extent(chance, ground), extent(chance, ground)
        ends = cut(chance, experts, tokens, SLICE)
        offs = offsets(ground, ends)
        a, b, dy = (
            torch.randn(size, device=ground.device).to(torch.float8_e4m3fn)
            for size in ((tokens, k), (experts, n, k), (n, tokens))
        )
        of_tokens, of_experts, rows, columns = (
            torch.rand(size, device=ground.device) + 0.5
            for size in ((tokens,), (experts, n), (experts, n), (experts, k))
        )
        turned = a.t().contiguous().t()
        with tuned(ground) as launched, gemmsmith.patch():
            out = torch._scaled_grouped_mm(
                a, b.mT, of_tokens, of_experts, offs=offs, use_fast_accum=True
            )
            dw = torch._scaled_grouped_mm(
                dy, turned, rows.flatten(), columns.flatten(), offs=offs, use_fast_accum=True
            )
            launched_ones += launched()
        exact = by_rows(a.double() * of_tokens[:, None], b.mT.double() * of_experts[:, None], ends)
        close(out[: ends[-1]], exact, SCALED_BOUND)
        factors = rows.double()[:, :, None] * columns.double()[:, None]
        close(dw, by_depth(dy, a, ends) * factors, SCALED_BOUND)
    assert launched_ones > CASES / 20


def test_a_graph_is_replayed_with_other_offsets(ground: Ground) -> None:
    """And nothing waits for the device on the way: not even to see who got how many tokens."""
    experts, tokens, n, k = 16, 1024, 512, 256
    chance = random.Random(20261125)
    x, w = leaf(ground, tokens, k), leaf(ground, experts, n, k, turned=True)
    dy = torch.randn(tokens, n, device=ground.device).bfloat16()
    offs = offsets(ground, cut(chance, experts, tokens))
    multiply = torch._grouped_mm

    def step() -> tuple[torch.Tensor, ...]:
        out = multiply(x, w, offs=offs)
        return out, *torch.autograd.grad(out, (x, w), dy)

    with tuned(ground) as launched, gemmsmith.patch():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert launched() == 6
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step()
        assert launched() == 3
    for _ in range(8):
        ends = cut(chance, experts, tokens)
        offs.copy_(offsets(ground, ends))
        graph.replay()
        out, dx, dw = found
        close(out[: ends[-1]], by_rows(x.detach(), w.detach(), ends), BOUND)
        close(dx[: ends[-1]], by_rows(dy, w.detach().mT, ends), BOUND)
        close(dw, by_depth(x.detach().t(), dy, ends), BOUND)
