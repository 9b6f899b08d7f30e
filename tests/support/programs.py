"""Compares a program with a patch and without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import gemmsmith
from tests.unit.ops.test_layers import close, given, loss


def same(net: nn.Module, act: Callable[[nn.Module], Any]) -> None:
    """Check that `act` returns the same with the patch, or raises the same kind of error."""
    results: list[Any] = []
    for patched in (False, True):
        torch.manual_seed(7)
        try:
            if patched:
                with gemmsmith.patch(net):
                    results.append(act(net))
            else:
                results.append(act(net))
        except Exception as error:  # noqa: BLE001 - compared
            results.append(error)
    expected, ours = results
    if isinstance(expected, Exception):
        assert type(ours) is type(expected), ours
        return
    if isinstance(ours, Exception):
        raise ours
    flat = [torch.utils._pytree.tree_leaves(one) for one in (ours, expected)]
    assert len(flat[0]) == len(flat[1])
    for one, other in zip(*flat, strict=True):
        if isinstance(one, torch.Tensor):
            close([one.detach()], [other.detach()])
        else:
            assert one == other


def total(net: nn.Module, *operands: torch.Tensor) -> torch.Tensor:
    return loss(net(*operands))


def data(net: nn.Module) -> list[torch.Tensor]:
    return [one.detach() for one in given(net)]


def parameters(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.detach() for name, one in net.named_parameters()}
