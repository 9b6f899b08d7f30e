"""A capture on a GPU: of compiled code, of FlexAttention, of CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import gemmsmith
from gemmsmith.core.problem import Problem

BF16, GPU = torch.bfloat16, torch.device("cuda")
WIDTH, INNER, ROWS = 256, 512, 128
SIZES = {(ROWS, INNER, WIDTH), (ROWS, WIDTH, INNER), (INNER, WIDTH, ROWS), (WIDTH, INNER, ROWS)}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH)).to(GPU, BF16)


def step(run: Any, model: nn.Module) -> list[torch.Tensor]:
    x = torch.linspace(-1, 1, ROWS * WIDTH, device=GPU).view(ROWS, WIDTH).to(BF16)
    run(x).float().square().mean().backward()
    found = [one.grad.clone() for one in model.parameters() if one.grad is not None]
    model.zero_grad()
    return found


@pytest.mark.parametrize(
    "how", [{}, {"mode": "reduce-overhead"}, {"dynamic": True}, {"backend": "eager"}], ids=str
)
def test_a_compiled_step(how: dict[str, Any]) -> None:
    """The same gradients, compiled once; the products of both passes."""
    torch._dynamo.reset()
    model = net()
    run = torch.compile(model, fullgraph=True, **how)
    with gemmsmith.capture() as shapes:
        found = [step(run, model) for _ in range(2)]
    with torch._dynamo.config.patch(error_on_recompile=True):
        expected = step(run, model)
    for gradients in found:
        for one, other in zip(gradients, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0.03, atol=1e-4)
    assert {(one.m, one.n, one.k) for one in shapes.problems} <= SIZES
    assert len(shapes.problems) >= 4


def test_flex_attention_within_a_step() -> None:
    torch._dynamo.reset()
    q = torch.linspace(-1, 1, 4 * 256 * 64, device=GPU).view(1, 4, 256, 64).to(BF16)
    weight = (torch.eye(64, device=GPU) * 2).to(BF16).requires_grad_()
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 256, 256, device=GPU)
    attend = torch.compile(flex_attention, fullgraph=True)

    def run() -> torch.Tensor:
        attend(q @ weight, q, q, block_mask=mask).float().sum().backward()
        found, weight.grad = weight.grad, None
        assert found is not None
        return found

    expected = run()
    with gemmsmith.capture() as shapes:
        found = run()
    torch.testing.assert_close(found, expected, rtol=0.03, atol=1e-3)
    assert Problem(m=1024, n=64, k=64, layout="tt") in shapes.problems
    assert any("triton_tem_" in one for one in shapes.unseen)


def test_a_cuda_graph() -> None:
    """What is recorded counts once, and that is said."""
    model, x = net(), torch.ones(ROWS, WIDTH, device=GPU, dtype=BF16)
    with torch.no_grad():
        expected = model(x)  # cuBLAS makes itself ready
        graph = torch.cuda.CUDAGraph()
        with gemmsmith.capture() as shapes:
            with torch.cuda.graph(graph):
                found = model(x)
            for _ in range(3):
                graph.replay()
    torch.testing.assert_close(found, expected)
    assert shapes.problems.total() == 2
    assert [count for what, count in shapes.unseen.items() if "CUDA graphs" in what] == [2]


def test_threads_of_two_streams_and_autograd() -> None:
    model = net()
    with gemmsmith.capture() as shapes:
        for _ in range(3):
            with torch.cuda.stream(torch.cuda.Stream()):
                step(model, model)
    torch.cuda.synchronize()
    assert sum(shapes.problems.values()) == 3 * 5  # no gradient of x is wanted
