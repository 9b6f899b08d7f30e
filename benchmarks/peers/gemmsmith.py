"""gemmsmith's best candidate for the problem, through the runtime that training code uses.

The candidate is timed even if the winner says that cuBLAS stays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.peers.peer import Ready, Setting, Unsupported, missing

if TYPE_CHECKING:
    import torch

ALIGNMENT = 256
"""Workspaces start where cudaMalloc's blocks do."""


class Gemmsmith:
    """The C ABI on every operand set, with workspaces that rotate as the operands do."""

    name = "gemmsmith"
    limit_s = 60.0

    def available(self) -> str | None:
        return missing("torch")

    def prepare(self, setting: Setting) -> Ready:
        import torch

        from gemmsmith.runtime.abi import status_text
        from gemmsmith.runtime.pack import LoadedPack
        from tuner.workloads.footprint import CACHE_FACTOR

        if setting.candidate is None or setting.pack is None:
            raise Unsupported(setting.reason or "no winner for this problem: tune it first")
        kernel = LoadedPack.open(setting.pack).kernel(setting.candidate.kernel.name)
        sets = setting.operands.sets
        arguments = [setting.operands.arguments(tensors) for tensors in sets]
        for of_set in arguments:
            of_set.set_launch(setting.candidate.launch, sm_count=setting.device.sm_count)
        status = kernel.can_implement(arguments[0])
        if status:
            raise Unsupported(f"the winner refuses the problem: {status_text(status)}")
        size = kernel.workspace_bytes(arguments[0])
        step = -(-size // ALIGNMENT) * ALIGNMENT
        slots = min(len(sets), -(-CACHE_FACTOR * setting.device.l2_bytes // step)) if size else 1
        arena = torch.empty(step * slots, dtype=torch.uint8, device=sets[0].d.device)

        def launch(i: int) -> torch.Tensor:
            at = i % len(sets)
            workspace = arena.data_ptr() + i % slots * step if size else 0
            kernel.run(arguments[at], workspace, setting.stream.pointer)
            return sets[at].d

        return Ready(launch=launch, note=setting.candidate.key)
