"""Winners in Lightning's Trainer.

    trainer = lightning.Trainer(..., callbacks=[GemmsmithLightningCallback("winners.gspack")])

Works with both packages of Lightning: `lightning.pytorch` and `pytorch_lightning`.
"""

from __future__ import annotations

from typing import Any

import torch

from gemmsmith.integrations.switching import Switch
from gemmsmith.ops.engine.source import Source

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback  # type: ignore[assignment,unused-ignore]


class GemmsmithLightningCallback(Callback):  # type: ignore[misc,unused-ignore]
    """Runs winners and fused layers during `trainer.fit()`, including its validation.

    Args:
        source: as for `gemmsmith.use`: a service's URL, a baked file or a client. None: the source
            of an earlier call of `gemmsmith.use`.
        only_model: replace products and layers of the module only, not those of the whole process.
    """

    def __init__(self, source: Source | None = None, *, only_model: bool = False) -> None:
        self._switch = Switch(source, only_model=only_model)

    def on_fit_start(self, trainer: Any, pl_module: torch.nn.Module) -> None:
        # Called on every rank, after the process group has been initialized.
        self._switch.on(pl_module)

    def on_fit_end(self, trainer: Any, pl_module: torch.nn.Module) -> None:
        self._switch.off()

    def on_exception(
        self, trainer: Any, pl_module: torch.nn.Module, exception: BaseException
    ) -> None:
        self._switch.off()
