"""Sums of columns: whose they are, and that every bias's gradient is one of them.

The kernels are tested in tests/gpu/test_column_sums.py.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from gemmsmith.core.epilogue import Epilogue
from gemmsmith.ops.engine import functions
from gemmsmith.ops.products.feedforward import MLP
from gemmsmith.ops.products.layer import FusedLinear, LinearFusion


@pytest.fixture
def summed(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Sizes of what is added up by `column_sums`."""
    found: list[torch.Size] = []
    known = functions.column_sums

    def told(dy: torch.Tensor) -> torch.Tensor:
        found.append(dy.shape)
        return known(dy)

    monkeypatch.setattr(functions, "column_sums", told)
    return found


def test_leading_dimensions_and_type() -> None:
    dy = torch.randn(3, 5, 8).bfloat16()
    out = functions.column_sums(dy)
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out, dy.flatten(0, 1).sum(0))
    assert torch.equal(functions.column_sums(dy.new_empty(0, 8)), torch.zeros(8).bfloat16())


@pytest.mark.parametrize("kernels_run", [True, False])
def test_large_ones_on_a_gpu_are_ours(kernels_run: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = SimpleNamespace(sums_of_columns=lambda rows: ("ours", rows.shape))
    monkeypatch.setattr("gemmsmith.ops.engine.by_triton._imported", lambda _: ours)
    monkeypatch.setattr(torch.Tensor, "is_cuda", kernels_run)
    large = torch.zeros(1, functions.LEAST_SUMMED // 64, 64, dtype=torch.float16)
    found: object = functions.column_sums(large)
    if not kernels_run:
        assert isinstance(found, torch.Tensor)
        return
    assert found == ("ours", large[0].shape)
    of_torch = (
        large[:, 1:],
        large.double(),
        large[:, :, :1].expand(-1, -1, 64),
        large.detach().requires_grad_(),
    )
    assert all(isinstance(functions.column_sums(one), torch.Tensor) for one in of_torch)
    with torch.no_grad():
        assert functions.column_sums(of_torch[-1]) == ("ours", large[0].shape)
    compiled = torch.compile(functions.column_sums, fullgraph=True, backend="eager")
    assert isinstance(compiled(large), torch.Tensor)


def test_every_bias(summed: list[torch.Size]) -> None:
    x = torch.randn(2, 3, 8, requires_grad=True)
    weight, bias = torch.randn(16, 8, requires_grad=True), torch.randn(16, requires_grad=True)
    down, down_bias = torch.randn(4, 16, requires_grad=True), torch.randn(4, requires_grad=True)
    residual = torch.randn(2, 3, 16)

    def gradients(out: torch.Tensor, *of: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, of, torch.ones_like(out))

    gradients(functions.Linear.apply(x, weight, bias, None, None), bias)  # type: ignore[no-untyped-call]
    assert summed == [(2, 3, 16)]
    adding = Epilogue.made_of(bias=True, residual=True)
    assert adding is not None
    operands = (x, weight, bias, residual, LinearFusion(adding, ("bias", "residual")))
    gradients(FusedLinear.apply(*operands)[0], bias)  # type: ignore[no-untyped-call]
    assert summed == [(2, 3, 16)] * 2
    hidden = functional.gelu(functional.linear(x, weight, bias))
    wanted = gradients(functional.linear(hidden, down, down_bias), bias, down_bias)
    for sums in (False, True):
        summed.clear()
        epilogue = Epilogue.backward_of("gelu", bias_gradient=sums)
        out = MLP.apply(x, weight, down, None, bias, down_bias, None, epilogue)[0]  # type: ignore[no-untyped-call]
        for mine, exactly in zip(gradients(out, bias, down_bias), wanted, strict=True):
            torch.testing.assert_close(mine, exactly)
        assert summed == [(2, 3, 16), (2, 3, 4)]
