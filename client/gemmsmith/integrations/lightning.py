"""Winners in Lightning's Trainer.

    trainer = lightning.Trainer(..., callbacks=[GemmsmithLightningCallback("winners.gspack")])

Both of Lightning's names are known: `lightning.pytorch` and `pytorch_lightning`.
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
    """Runs winners and fused layers while `trainer.fit()` does, validation within it included.

    Args:
        source: as of `gemmsmith.use`: a service's URL, a baked file, a client; None: what that was
            called with before.
        only_model: replace the module's products and layers alone, and no products elsewhere in the
            process.
    """

    def __init__(self, source: Source | None = None, *, only_model: bool = False) -> None:
        self._switch = Switch(source, only_model=only_model)

    def on_fit_start(self, trainer: Any, pl_module: torch.nn.Module) -> None:
        """Called by the Trainer, on every rank, once the processes have met."""
        self._switch.on(pl_module)

    def on_fit_end(self, trainer: Any, pl_module: torch.nn.Module) -> None:
        """Called by the Trainer."""
        self._switch.off()

    def on_exception(
        self, trainer: Any, pl_module: torch.nn.Module, exception: BaseException
    ) -> None:
        """Called by the Trainer."""
        self._switch.off()
