"""QuACK's CuTe-DSL matrix product, tuned by its own autotuner (`gemm(..., tuned=True)`).

Also with what follows it, where QuACK has the same: a bias and GELU, a residual, SwiGLU. Its wheels
are large (nvidia-cutlass-dsl-libs-cu13 4.8.1 alone is 92 MB), so it runs where they are installed.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from benchmarks.peers.peer import Ready, Setting, Unsupported, missing
from gemmsmith.core.epilogue import Epilogue

if TYPE_CHECKING:
    import torch

    from tuner.workloads.workload import OperandSet

Call = Callable[[], object]


class Quack:
    """Functions of `quack.gemm_interface`, which write into our D."""

    name = "quack"
    limit_s = 180.0

    def available(self) -> str | None:
        return missing("torch", "quack", "cutlass", "tvm_ffi", "einops")

    def prepare(self, setting: Setting) -> Ready:
        problem = setting.problem
        epilogue = problem.operation.epilogue
        if problem.operation.is_narrow_float:
            raise Unsupported("its interface takes no per-tensor FP8 scales on Hopper")
        if problem.n % 8 or problem.contiguous_a % 8 or problem.contiguous_b % 8:
            raise Unsupported("it needs rows of whole 16 bytes")
        if epilogue not in _CALLS:
            raise Unsupported(f"it has no {epilogue.value}")
        library, sets = import_module("quack.gemm_interface"), setting.operands.sets
        calls = [_CALLS[epilogue](library, each) for each in sets]

        def launch(i: int) -> torch.Tensor:
            calls[i % len(sets)]()
            return sets[i % len(sets)].d

        launch(0)  # tunes and compiles
        return Ready(launch=launch)


def _bare(library: Any, each: OperandSet) -> Call:
    if each.d.shape[0] > 1:
        return lambda: library.gemm(each.a, each.b, out=each.d, tuned=True)
    return lambda: library.gemm(each.a[0], each.b[0], out=each.d[0], tuned=True)


def _gelu(library: Any, each: OperandSet) -> Call:
    assert each.bias is not None
    bias = each.bias.view(-1)
    return lambda: library.gemm_act(
        *(each.a[0], each.b[0]),
        bias=bias,
        activation="gelu_tanh_approx",
        postact_out=each.d[0],
        store_preact=False,
        tuned=True,
    )


def _swiglu(library: Any, each: OperandSet) -> Call:
    """Its kernels take rows of gate and up in turns: a copy of the weight lies so."""
    weight = each.b[0].mT
    rows, width = weight.shape
    turns = weight.reshape(2, rows // 2, width).transpose(0, 1).reshape(rows, width).mT
    return lambda: library.gemm_act(
        *(each.a[0], turns),
        activation="swiglu",
        postact_out=each.d[0],
        store_preact=False,
        tuned=True,
    )


def _residual(library: Any, each: OperandSet) -> Call:
    assert each.residual is not None
    bias = None if each.bias is None else each.bias.view(-1)
    residual = each.residual[0]
    return lambda: library.gemm_add(
        each.a[0], each.b[0], residual, out=each.d[0], bias=bias, tuned=True
    )


_CALLS: dict[Epilogue, Callable[[Any, OperandSet], Call]] = {
    Epilogue.NONE: _bare,
    Epilogue.BIAS_GELU_TANH: _gelu,
    Epilogue.SILU_GATE: _swiglu,
    Epilogue.RESIDUAL: _residual,
    Epilogue.BIAS_RESIDUAL: _residual,
}
