"""A part of a step that may have a faster form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from gemmsmith.program.observed import ObservedTensor

Run = Callable[[], Sequence[torch.Tensor]]
"""Runs a form once. Returns its result and its gradients, or nothing if there is no use in
comparing them."""


class Forms(NamedTuple):
    """Both forms of a part, ready to run.

    Attributes:
        before: as the program runs it.
        after: as it is advised.
        scale: times as much work in the program as in a run of these, if they run a sample.
    """

    before: Run
    after: Run
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class StepPart:
    """A part of a step.

    Attributes:
        rule: name of the rule that named it.
        what: what the program does.
        change: the code that would be faster.
        place: file, line and function; empty if it has none.
        calls: how often it runs in a step.
        forms: makes both forms on a device.
    """

    rule: str
    what: str
    change: str
    place: str
    calls: int
    forms: Callable[[torch.device], Forms]


def like(tensor: ObservedTensor, device: torch.device) -> torch.Tensor:
    """Random numbers of a tensor's type and size, dense; a leaf if it needs a gradient."""
    made = torch.randn(tensor.size, device=device).to(dtype_of(tensor.dtype))
    return made.requires_grad_(tensor.needs_grad)


def dtype_of(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def both_ways(forward: Callable[[], torch.Tensor], *leaves: torch.Tensor) -> Run:
    """Runs `forward`, and its backward pass if a leaf needs a gradient."""
    leaves = tuple(leaf for leaf in leaves if leaf.requires_grad)
    gradients: list[torch.Tensor] = []

    def run() -> list[torch.Tensor]:
        result = forward()
        if not leaves:
            return [result]
        if not gradients:  # the same for both forms
            same = torch.Generator(result.device).manual_seed(0)
            made = torch.randn(result.shape, generator=same, device=result.device)
            gradients.append(made.to(result.dtype))
        return [result.detach(), *torch.autograd.grad(result, leaves, gradients[0])]

    return run
