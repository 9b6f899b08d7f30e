"""Recognized layers of every model in a process: for programs in which nobody calls `patch(model)`.

A layer's class is swapped as by `patch(model)` once the layer has become a part of another module.
A model that consists of one such layer alone is not seen.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from gemmsmith.ops.models import layers
from gemmsmith.ops.models.forwards import Forwards
from gemmsmith.ops.models.norms import NormRecipe
from gemmsmith.program import built


class _Shared:
    """Layers of one sort: how many blocks want them swapped at present, and how to undo it."""

    def __init__(self, *, norms: bool) -> None:
        self._norms = norms
        self._lock = threading.Lock()
        self._wanted = 0
        self._stack = ExitStack()

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Until the last of such blocks ends."""
        with self._lock:
            self._wanted += 1
            if self._wanted == 1:
                self._stack = self._begun()
        try:
            yield
        finally:
            with self._lock:
                self._wanted -= 1
                if not self._wanted:
                    self._stack.close()

    def _begun(self) -> ExitStack:
        forwards = Forwards()

        def take_over(module: Any) -> None:
            # Its parts as well: of a copy, torch tells the outermost module alone.
            layers.take_over(
                forwards,
                (
                    one
                    for one in layers.recognized(module)
                    if isinstance(one.recipe, NormRecipe) is self._norms
                ),
            )

        with ExitStack() as stack:
            stack.callback(forwards.undo)
            stack.enter_context(built.listening(take_over))
            return stack.pop_all()


_norms, _products = _Shared(norms=True), _Shared(norms=False)


@contextmanager
def every_norm() -> Iterator[None]:
    """Swap the recognized norms of all models that are built or were, until the block ends.

    Blocks may overlap: the last one to end gives the layers their classes back.
    """
    with _norms.swapped():
        yield


@contextmanager
def every_model() -> Iterator[None]:
    """As `every_norm`, all recognized layers."""
    with _norms.swapped(), _products.swapped():
        yield
