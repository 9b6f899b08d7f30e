"""Patches recognized layers of every model in a process, for programs without `patch(model)`.

A layer is patched as by `patch(model)` once it has become a child of another module. A model that
consists of a single layer is not noticed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from gemmsmith.ops.models import layers
from gemmsmith.ops.models.forwards import Forwards
from gemmsmith.ops.models.norms import NormRecipe
from gemmsmith.ops.models.rotary import Functions
from gemmsmith.program import built


class _Shared:
    """A patch of norms and rotary embeddings, or of all other layers, that several blocks share."""

    def __init__(self, *, norms: bool) -> None:
        self._norms = norms
        self._lock = threading.Lock()
        self._blocks = 0
        self._stack = ExitStack()

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Patch the layers until the last of these blocks ends."""
        with self._lock:
            self._blocks += 1
            if self._blocks == 1:
                self._stack = self._patch()
        try:
            yield
        finally:
            with self._lock:
                self._blocks -= 1
                if not self._blocks:
                    self._stack.close()

    def _patch(self) -> ExitStack:
        forwards, functions = Forwards(), Functions()

        def take_over(module: Any) -> None:
            # Includes the module's children: of a copy, torch reports the outermost module only.
            layers.take_over(
                forwards,
                (
                    layer
                    for layer in layers.recognized(module)
                    if isinstance(layer.recipe, NormRecipe) is self._norms
                ),
            )
            if self._norms:
                functions.take_over(module.modules())

        with ExitStack() as stack:
            stack.callback(forwards.undo)
            stack.callback(functions.undo)
            stack.enter_context(built.listening(take_over))
            return stack.pop_all()


_norms, _products = _Shared(norms=True), _Shared(norms=False)


@contextmanager
def every_norm() -> Iterator[None]:
    """Patch the recognized norms of all models, existing and new ones, until the block ends.

    Blocks may overlap: the last one to end removes the patch.
    """
    with _norms.patched():
        yield


@contextmanager
def every_model() -> Iterator[None]:
    """As `every_norm`, for all recognized layers."""
    with _norms.patched(), _products.patched():
        yield
