"""Winners in transformers' Trainer.

    trainer = Trainer(..., callbacks=[GemmsmithCallback("winners.gspack")])

Accelerate, FSDP, DDP and torch.compile are the Trainer's own business and stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback

from gemmsmith.integrations.switching import Switch
from gemmsmith.ops.engine.source import Source


class GemmsmithCallback(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Runs winners and fused layers while `trainer.train()` does, evaluations within it included.

    Where training raises, they go on until `close` or the next `train`.

    Args:
        source: as of `gemmsmith.use`: a service's URL, a baked file, a client; None: what that was
            called with before.
        only_model: replace the model's products and layers alone, and no products elsewhere in the
            process.
    """

    def __init__(self, source: Source | None = None, *, only_model: bool = False) -> None:
        self._switch = Switch(source, only_model=only_model)

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Called by the Trainer."""
        self._switch.on(model)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by the Trainer."""
        self._switch.off()

    def close(self) -> None:
        """Run torch's own operators again."""
        self._switch.off()
