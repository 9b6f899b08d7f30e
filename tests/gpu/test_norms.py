"""Norms whose backward pass is our Triton kernel, against FP64 and torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gemmsmith.ops.products import norms

EPSILON = 1e-6
BOUNDS = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 2e-6}
"""Relative error in the Frobenius norm: rounding of a result."""

SIZES = [(norms.LEAST // width + 3, width) for width in (64, 128, 768, 1000, 1024, 4096, 8192)]


def run(x: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor) -> list[torch.Tensor]:
    out = norms.rms_norm(x, weight, EPSILON)
    assert type(out.grad_fn).__name__ == "RMSNormBackward"
    return [out.detach(), *torch.autograd.grad(out, [x, weight], gradient)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_both_gradients(size: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x = (3 * torch.randn(size, device="cuda")).to(dtype).requires_grad_()
    weight = torch.randn(size[1], device="cuda").to(dtype).requires_grad_()
    gradient = torch.randn(size, device="cuda").to(dtype)
    found = run(x, weight, gradient)
    exact = [one.detach().double().requires_grad_() for one in (x, weight)]
    out = nn.functional.rms_norm(exact[0], weight.shape, exact[1], EPSILON)
    wanted = [out, *torch.autograd.grad(out, exact, gradient.double())]
    for one, other in zip(found, wanted, strict=True):
        assert (one.double() - other).norm() <= BOUNDS[dtype] * other.norm()
    for one, again in zip(found, run(x, weight, gradient), strict=True):
        assert torch.equal(one, again)


def test_a_gradient_that_does_not_lie_together() -> None:
    x = torch.randn(8192, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(1, 2048, device="cuda", dtype=torch.bfloat16).expand(8192, -1)
    together = run(x, weight, gradient.contiguous())
    for one, other in zip(run(x, weight, gradient), together, strict=True):
        assert torch.equal(one, other)
