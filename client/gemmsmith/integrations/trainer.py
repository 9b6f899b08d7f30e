"""Winners in transformers' Trainer.

    trainer = Trainer(..., callbacks=[GemmsmithCallback("winners.gspack")])

The Trainer's use of Accelerate, FSDP, DDP and torch.compile is unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback

from gemmsmith.integrations.switching import Switch
from gemmsmith.ops.engine.source import Source


class GemmsmithCallback(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Runs winners and fused layers during `trainer.train()`, including its evaluations.

    If training raises an exception, they stay active until `close` or the next `train`.

    Args:
        source: as for `gemmsmith.use`: a service's URL, a baked file or a client. None: the source
            of an earlier call of `gemmsmith.use`.
        only_model: replace products and layers of the model only, not those of the whole process.
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
        self._switch.on(model)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._switch.off()

    def close(self) -> None:
        self._switch.off()
