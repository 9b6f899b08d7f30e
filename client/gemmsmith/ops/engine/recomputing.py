"""A checkpointed region is recomputed as it was computed.

`torch.utils.checkpoint` without reentry drops the tensors that a region of a model saves for its
gradients, and runs the region again in the backward pass. Then the same tensors must be saved in
the same order, or torch raises. Which tensors a layer saves depends on decisions of ours: whether a
fused kernel has won, for example, or whether a patch is open. So the first question in a region
fixes the answer. The recomputation gets that answer and the layers that were patched then.

Alternatively, layers of ours could save the same tensors whatever the decisions. Then layers that
have no winner would pay for autograd functions in Python, or layers with one would not be fused
wherever torch lets programs hook saved tensors.

torch has no interface that identifies a region, so this file knows two names of
`torch.utils.checkpoint`. Other hooks move or compress saved tensors, and recompute nothing. A
region with reentry is recomputed and differentiated at once, and needs nothing.
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
"""A context in which something is as it was, for a recomputation."""

saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
"""The functions that pack and unpack what autograd saves in this thread. Returns None without."""

_KEPT = "_gemmsmith"
_remembered: list[Callable[[], Again]] = []


class _Recomputing(threading.local):
    """The answer that holds in this thread's recomputation, in a tuple. None outside of one."""

    kept: tuple[Any] | None = None


_recomputing = _Recomputing()


def remember(keep: Callable[[], Again]) -> None:
    """Have `keep` called in each region; its result restores that state for the recomputation."""
    _remembered.append(keep)


def as_computed(
    pack: Callable[..., Any], ask: Callable[[], T | None], elsewhere: T | None
) -> T | None:
    """The first result of `ask` in this region; `elsewhere` outside of a region.

    Returns None in the recomputation of a region that did not ask: nothing of ours computed it.

    Args:
        pack: the first of `saved_tensors_hooks`.
        ask: the same function at every call.
        elsewhere: what `ask` returns outside of regions.
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
            again = [keep() for keep in _remembered]
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
