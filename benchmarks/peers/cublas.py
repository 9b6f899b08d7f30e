"""cuBLAS as a torch program calls it: the ratio's denominator, the tuner's own baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.peers.peer import Ready, Setting, missing

if TYPE_CHECKING:
    import torch


class CuBlas:
    """`torch.mm(out=)`, `torch.bmm(out=)` or `torch._scaled_mm(out=)`, with torch's defaults."""

    name = "cublas"
    limit_s = 60.0

    def available(self) -> str | None:
        return missing("torch")

    def prepare(self, setting: Setting) -> Ready:
        from tuner.measure.baseline import Baseline

        baseline = Baseline(setting.operands, setting.stream)
        sets = setting.operands.sets

        def launch(i: int) -> torch.Tensor:
            baseline.launch(i)
            return sets[i % len(sets)].d

        return Ready(launch=launch, note=baseline.name)
