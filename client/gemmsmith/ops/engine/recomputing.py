"""A checkpointed region is recomputed as it was computed.

`torch.utils.checkpoint` without reentry forgets what a region of a model saves for its gradients,
and runs the region once more in the backward pass. Then the same tensors must be saved in the same
order, or the program ends. Which layers save what depends on decisions of ours: whether a fused
kernel has won, say, or whether a patch is open. So the first question that is asked in a region
fixes its answer, and the recomputation gets that answer and the patched layers of that time.

The alternative is that layers of ours always save the same tensors, whatever the decisions. Then
layers without a winner would pay for autograd functions in Python, or layers with one would not be
fused wherever torch lets programs look at saved tensors.

torch has no interface that identifies a region, so this file knows two names of
`torch.utils.checkpoint`. Elsewhere, saved tensors that are moved or compressed are not recomputed.
A region with reentry is recomputed and differentiated at once, and needs nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import _CheckpointFrame

T = TypeVar("T")

Again = Callable[[], AbstractContextManager[None]]
"""Restores something for the time of a recomputation."""

saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
"""Functions that pack and unpack what autograd saves in this thread; None if there are no such."""

_KEPT = "_gemmsmith"
_remembered: list[Callable[[], Again]] = []


class _Recomputing(threading.local):
    """The answer in this thread's recomputation, in a tuple. None outside of one."""

    kept: tuple[Any] | None = None


_recomputing = _Recomputing()


def remember(what: Callable[[], Again]) -> None:
    """Have `what` called in each region, to restore for its recomputation what is so now."""
    _remembered.append(what)


def as_computed(
    pack: Callable[..., Any], ask: Callable[[], T | None], elsewhere: T | None
) -> T | None:
    """What `ask` gave when this region first asked; `elsewhere` outside of a region.

    Returns None in the recomputation of a region that did not ask: nothing of ours computed it.

    Args:
        pack: the first of `saved_tensors_hooks`.
        ask: the question; always the same one.
        elsewhere: its answer at present.
    """
    kept = _recomputing.kept
    if kept is None:
        region = _region(pack)
        if region is None:
            recomputes = "_recomputation_hook" in getattr(pack, "__qualname__", "")
            return None if recomputes else elsewhere
        kept = vars(region).get(_KEPT)
        if kept is None:
            kept = (ask(),)
            again = [what() for what in _remembered]
            setattr(region, _KEPT, kept)
            region.recompute_fn = partial(_recompute, region.recompute_fn, kept, again)
    answer: T | None = kept[0]
    return answer


def _region(pack: Callable[..., Any]) -> _CheckpointFrame | None:
    """The region whose forward pass runs in this thread."""
    for cell in getattr(pack, "__closure__", None) or ():
        if isinstance(cell.cell_contents, _CheckpointFrame):
            return cell.cell_contents
    return None


def _recompute(
    compute: Callable[..., object], kept: tuple[Any], again: Sequence[Again], *operands: Any
) -> None:
    before, _recomputing.kept = _recomputing.kept, kept
    try:
        with ExitStack() as stack:
            for restored in again:
                stack.enter_context(restored())
            compute(*operands)
    finally:
        _recomputing.kept = before
