"""Optimizers as programs write them. Pytest does not rewrite the assertions of this file."""

from __future__ import annotations

from typing import Any

import torch


def current(G: torch.Tensor, steps: int) -> Any:  # noqa: N803 - as programs write it
    """Of today's Muon."""
    assert G.ndim >= 2
    a, b, c = (3.4445, -4.7750, 2.0315)
    X = G.bfloat16()  # noqa: N806
    if G.size(-2) > G.size(-1):
        X = X.mT  # noqa: N806
    X = X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-7)  # noqa: N806
    for _ in range(steps):
        A = X @ X.mT  # noqa: N806
        B = b * A + c * A @ A  # noqa: N806
        X = a * X + B @ X  # noqa: N806
    if G.size(-2) > G.size(-1):
        X = X.mT  # noqa: N806
    return X


def early(g: torch.Tensor, steps: int = 10, eps: float = 1e-7) -> Any:
    assert len(g.shape) == 2
    a, b, c = (3.0, -3.2, 1.2)
    x = g.bfloat16()
    x /= x.norm() + eps
    if g.shape[0] > g.shape[1]:
        x = x.T
    for _ in range(steps):
        square = x @ x.T
        product = square @ x
        x = a * x + b * product + c * square @ product
    if g.shape[0] > g.shape[1]:
        x = x.T
    return x.to(g.dtype)


class OwnMuon(torch.optim.Optimizer):
    """Calls an iteration of this module by its name, as programs do."""

    def __init__(self, params: Any, name: str = "current", **options: Any) -> None:
        super().__init__(params, {})
        self.name, self.options = name, options

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        iterate: Any = current if self.name == "current" else early
        for group in self.param_groups:
            for param in group["params"]:
                param.add_(iterate(param.grad, 5, **self.options), alpha=-0.1)
