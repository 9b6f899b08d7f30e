"""`check_invariance` on a GPU: cuBLAS sums a product of 4096×14336 in several orders, by M."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import gemmsmith

WIDTH, INNER, ROWS = 4096, 14336, 4
LENGTHS = (1, 4, 16, 64, 256)


class Mlp(nn.Module):
    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER, bias=bias), nn.Linear(INNER, WIDTH, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.up(x)))


@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_cublas_is_named(bias: bool) -> None:
    torch.manual_seed(41)
    with torch.device("cuda"):
        model = nn.Sequential(nn.RMSNorm(WIDTH), Mlp(bias=bias)).bfloat16()
    differing: list[Any] = []
    for length in LENGTHS:
        x = torch.randn(ROWS, length, WIDTH, device="cuda", dtype=torch.bfloat16)
        whole = model(x)
        alone = [torch.equal(model(x[row : row + 1])[0], whole[row]) for row in range(ROWS)]
        report = gemmsmith.check_invariance(model, x)
        print(length, report)
        assert not report or all(alone)
        assert report.modules == 4
        if report.first is not None:
            differing.append(report.first)
    assert differing, "cuBLAS gave one class at all of these sizes"
    for first in differing:
        assert first.module in ("1.up", "1.down")
        assert first.kind == "Linear"
        assert first.operator in ("aten.mm", "aten.addmm")
        assert first.batch != "again"
        assert first.ulp > 0
        assert first.dtype == torch.bfloat16


def test_random_state_and_settings_stay() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU()).cuda()
    x = torch.randn(4, 64, device="cuda")
    state = torch.cuda.get_rng_state()
    gemmsmith.check_invariance(model, x)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    with pytest.raises(ValueError, match="inputs are on cpu, the model is on cuda:0"):
        gemmsmith.check_invariance(model, x.cpu())


def test_results_of_modules_are_not_kept() -> None:
    """A batch is checked without keeping what its modules return."""
    model = nn.Sequential(*[nn.ReLU() for _ in range(64)])
    x = torch.randn(4, 2048, 4096, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert gemmsmith.check_invariance(model, x)
    assert torch.cuda.max_memory_allocated() - before < 10 * 2 * x.nbytes
