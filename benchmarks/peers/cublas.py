"""cuBLAS as a torch program calls it: the ratio's denominator, the tuner's own baseline."""

from __future__ import annotations

from benchmarks.peers.peer import Ready, Setting, missing


class CuBlas:
    """What torch runs for the operation (`tuner.workloads`), with torch's defaults."""

    name = "cublas"
    limit_s = 60.0

    def available(self) -> str | None:
        return missing("torch")

    def prepare(self, setting: Setting) -> Ready:
        from tuner.measure.baseline import Baseline

        baseline = Baseline(setting.operands, setting.stream)
        return Ready(launch=baseline.compute, note=baseline.name)
