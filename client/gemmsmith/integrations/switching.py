"""Winners from one moment of somebody else's loop to another: what trainers' callbacks share."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from gemmsmith.ops.engine.source import Source, use
from gemmsmith.ops.models.patching import patch


class Switch:
    """`gemmsmith.use` and a block of `gemmsmith.patch`, in two calls.

    Args:
        source: as of `gemmsmith.use`; None: what that was called with before, if it was.
        only_model: replace what is the model's alone, as `patch(model)`; else all products of the
            process as well, those of an optimizer too.
    """

    def __init__(self, source: Source | None = None, *, only_model: bool = False) -> None:
        self._source = source
        self._only_model = only_model
        self._block = ExitStack()

    def on(self, model: torch.nn.Module | None) -> None:
        """Run winners from now on; again: as after `off`. On several ranks a collective."""
        self.off()
        if self._source is not None:
            use(self._source)
        if model is None or not self._only_model:
            self._block.enter_context(patch())
        if model is not None:
            self._block.enter_context(patch(model))

    def off(self) -> None:
        """Run torch's own operators again. Harmless where nothing is on."""
        self._block.close()
