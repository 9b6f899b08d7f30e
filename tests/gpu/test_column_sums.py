"""Gradients of biases by our Triton kernels, against FP64. On the host:
tests/unit/ops/test_column_sums.py.
"""

from __future__ import annotations

import pytest
import torch

from gemmsmith.ops.engine import functions

BOUNDS = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 2e-6}
"""Relative error in the Frobenius norm: rounding of a result."""

SIZES = [
    (8192, 1024), (8192, 3072), (16384, 4096), (65536, 1024), (8193, 1000), (5000, 1023),
    (70000, 64), (4_200_000, 1), (33, 131072), (1, 2**22),
]  # fmt: skip


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_sum(size: tuple[int, int], dtype: torch.dtype) -> None:
    from gemmsmith.ops.engine import triton_sums

    torch.manual_seed(1)
    dy = torch.randn(size, device="cuda").to(dtype)
    found = functions.column_sums(dy)
    assert torch.equal(found, triton_sums.sums_of_columns(dy))  # theirs is another order
    wanted = dy.double().sum(0)
    assert found.dtype is dtype
    assert (found.double() - wanted).norm() <= BOUNDS[dtype] * wanted.norm()
    for _ in range(3):
        assert torch.equal(found, functions.column_sums(dy))


def test_columns_of_a_wider_tensor() -> None:
    whole = torch.randn(16384, 3000, device="cuda").bfloat16()
    for first in (0, 8, 1):  # 1: no pointer that is aligned
        part = whole[:, first : first + 1024]
        assert torch.equal(functions.column_sums(part), functions.column_sums(part.contiguous()))


def test_a_graph_of_a_linear_layers_backward_pass() -> None:
    x = torch.randn(8192, 256, device="cuda").bfloat16()
    weight = torch.randn(1024, 256, device="cuda").bfloat16().requires_grad_()
    bias = torch.zeros(1024, device="cuda").bfloat16().requires_grad_()
    dy = torch.randn(8192, 1024, device="cuda").bfloat16()

    def step() -> torch.Tensor:
        out = functions.Linear.apply(x, weight, bias, None, None)
        return torch.autograd.grad(out, bias, dy)[0]

    once = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(2):
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, once)


def test_a_graph_that_is_captured_before_a_kernel_was_compiled() -> None:
    """It holds torch's sum."""
    dy = torch.randn(16384, 1016, device="cuda").bfloat16()
    wanted = dy.sum(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = functions.column_sums(dy)
    graph.replay()
    assert torch.equal(captured, wanted)


def test_a_negated_tensor() -> None:
    dy = torch.randn(16384, 1024, device="cuda").bfloat16()
    negated = functions.column_sums(torch._neg_view(dy))
    assert torch.equal(negated, -functions.column_sums(dy))
