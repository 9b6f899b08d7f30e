"""Switches winners on and off during a training loop: the common part of trainers' callbacks."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from gemmsmith.ops.engine.source import Source, use
from gemmsmith.ops.models.patching import patch


class Switch:
    """`gemmsmith.use` and a `gemmsmith.patch` block that are switched on and off by two calls.

    Args:
        source: as for `gemmsmith.use`. None: the source of an earlier call of `gemmsmith.use`.
        only_model: replace only what `patch(model)` replaces. Otherwise also replace all products
            of the process, including those of an optimizer.
    """

    def __init__(self, source: Source | None = None, *, only_model: bool = False) -> None:
        self._source = source
        self._only_model = only_model
        self._block = ExitStack()

    def on(self, model: torch.nn.Module | None) -> None:
        """Run winners from now on. On several ranks this is a collective."""
        self.off()
        if self._source is not None:
            use(self._source)
        if model is None or not self._only_model:
            self._block.enter_context(patch())
        if model is not None:
            self._block.enter_context(patch(model))

    def off(self) -> None:
        """Run torch's own operators again. Has no effect if winners are not switched on."""
        self._block.close()
