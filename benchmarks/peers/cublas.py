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
        from tuner.measure.torch_calls import TorchCall

        default = TorchCall(setting.operands, setting.stream)
        return Ready(launch=default.compute, note=default.name)
