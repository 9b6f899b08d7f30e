"""QuACK's CuTe-DSL matrix product, tuned by its own autotuner (`gemm(..., tuned=True)`).

Its wheels do not fit beside ours within what is carried to a GPU host (nvidia-cutlass-dsl-libs-cu13
4.8.1 alone is 92 MB), so it runs where someone has installed it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from benchmarks.peers.peer import Ready, Setting, Unsupported, missing

if TYPE_CHECKING:
    import torch


class Quack:
    """`quack.gemm_interface.gemm`, written into our D."""

    name = "quack"
    limit_s = 180.0

    def available(self) -> str | None:
        return missing("torch", "quack", "cutlass", "tvm_ffi", "einops")

    def prepare(self, setting: Setting) -> Ready:
        problem = setting.problem
        if problem.operation.is_narrow_float:
            raise Unsupported("its interface takes no per-tensor FP8 scales on Hopper")
        if problem.n % 8 or problem.contiguous_a % 8 or problem.contiguous_b % 8:
            raise Unsupported("it needs rows of whole 16 bytes")
        gemm = import_module("quack.gemm_interface").gemm
        sets = setting.operands.sets

        def launch(i: int) -> torch.Tensor:
            each = sets[i % len(sets)]
            if problem.batch > 1:
                gemm(each.a, each.b, out=each.d, tuned=True)
            else:
                gemm(each.a[0], each.b[0], out=each.d[0], tuned=True)
            return each.d

        launch(0)  # tunes and compiles
        return Ready(launch=launch)
