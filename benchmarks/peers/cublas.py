"""cuBLAS as a torch program calls it: the tuner's default, which ratios are relative to."""

from __future__ import annotations

from benchmarks.peers.peer import Ready, Setting, missing


class CuBlas:
    """The operation as torch runs it (`tuner.workloads`), with torch's settings."""

    name = "cublas"
    limit_s = 60.0

    def available(self) -> str | None:
        return missing("torch")

    def prepare(self, setting: Setting) -> Ready:
        from tuner.measure.torch_calls import TorchCall

        default = TorchCall(setting.operands, setting.stream)
        return Ready(launch=default.compute, note=default.name)
