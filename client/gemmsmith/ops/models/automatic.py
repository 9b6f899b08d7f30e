"""Recognized layers of every model in a process: for programs in which nobody calls `patch(model)`.

A layer's class is swapped as by `patch(model)` once the layer has become a part of another module.
A model that consists of one such layer alone is not seen.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from gemmsmith import built
from gemmsmith.ops.models import layers
from gemmsmith.ops.models.swapping import Swaps


class _Swapped:
    """Who wants layers swapped at present, and how to undo it."""

    lock = threading.Lock()
    wanted = 0
    stack = ExitStack()


@contextmanager
def every_model() -> Iterator[None]:
    """Swap the recognized layers of all models that are built or were, until the block ends.

    Blocks may overlap: the last one to end gives the layers their classes back.
    """
    with _Swapped.lock:
        _Swapped.wanted += 1
        if _Swapped.wanted == 1:
            _Swapped.stack = _begun()
    try:
        yield
    finally:
        with _Swapped.lock:
            _Swapped.wanted -= 1
            if not _Swapped.wanted:
                _Swapped.stack.close()


def _begun() -> ExitStack:
    swaps = Swaps()

    def swap(module: Any) -> None:
        # Its parts as well: of a copy, torch tells the outermost module alone.
        swaps.make((one.module, one.swapped_class) for one in layers.recognized(module))

    with ExitStack() as stack:
        stack.callback(swaps.undo)
        stack.enter_context(built.told(swap))
        return stack.pop_all()
