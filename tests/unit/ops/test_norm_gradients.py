"""The backward pass of RMS norms: what our kernel computes, and whose norms it computes it for."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from gemmsmith.ops.models.layers import recognized
from gemmsmith.ops.products import norms

EPSILON = 1e-6


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float16, 5e-4)]
)
@pytest.mark.parametrize("size", [(3, 5, 96), (64, 128), (1, 1)])
def test_gradients(size: tuple[int, ...], dtype: torch.dtype, bound: float) -> None:
    torch.manual_seed(1)
    x, gradient = (3 * torch.randn(size)).to(dtype), torch.randn(size).to(dtype)
    weight = torch.randn(size[-1]).to(dtype)
    scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPSILON)
    found = norms.gradients(gradient, x, weight, scale, (True, True))
    exact = [one.double().requires_grad_() for one in (x, weight)]
    out = functional.rms_norm(exact[0], weight.shape, exact[1], EPSILON)
    wanted = torch.autograd.grad(out, exact, gradient.double())
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype is dtype
        assert (one - other).norm() <= bound * other.norm() + 1e-7


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)])
def test_only_gradients_that_are_needed(needs: tuple[bool, bool]) -> None:
    x, gradient, weight = torch.randn(4, 6), torch.randn(4, 6), torch.randn(6)
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON)
    both = norms.gradients(gradient, x, weight, scale, (True, True))
    for mine, whole, need in zip(
        norms.gradients(gradient, x, weight, scale, needs), both, needs, strict=True
    ):
        assert (mine is not None) == need
        assert mine is None or torch.equal(mine, whole)


def test_the_function_is_differentiated_twice() -> None:
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, dtype=torch.float64, requires_grad=True)

    def once(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = norms.RMSNorm.apply(a, b, EPSILON)[0]  # type: ignore[no-untyped-call]
        return out

    assert torch.autograd.gradgradcheck(once, (x, weight))
    assert torch.autograd.gradgradcheck(lambda a: once(a, weight.detach()), (x,))


def test_small_norms_and_those_without_gradients_are_torchs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight, x = torch.ones(4096), torch.empty(1, 4096, requires_grad=True)
    assert not norms.is_ours(x.expand(norms.LEAST // 4096, -1), weight)  # on the CPU
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert norms.is_ours(x.expand(norms.LEAST // 4096, -1), weight)
    assert not norms.is_ours(x.expand(norms.LEAST // 4096 - 1, -1), weight)
    assert not norms.is_ours(x.detach().expand(norms.LEAST // 4096, -1), weight)
    with torch.no_grad():
        assert not norms.is_ours(x.expand(norms.LEAST // 4096, -1), weight)
    wide = torch.empty(1, norms.WIDEST + 8, requires_grad=True)
    assert not norms.is_ours(wide.expand(4096, -1), torch.ones(norms.WIDEST + 8))
    narrow = torch.empty(1, 2, requires_grad=True)
    assert norms.is_ours(narrow.expand(norms.MOST_ROWS, -1), torch.ones(2))
    assert not norms.is_ours(narrow.expand(norms.MOST_ROWS + 1, -1), torch.ones(2))


def test_torchs_own_module_is_recognized() -> None:
    class Other(nn.RMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    net = nn.ModuleList([nn.RMSNorm(8), nn.RMSNorm((2, 8)), Other(8)])
    net.append(nn.RMSNorm(8, elementwise_affine=False))
    assert [one.name for one in recognized(net)] == ["0"]
    assert str(next(recognized(net))) == "RMSNorm (rms norm)"
