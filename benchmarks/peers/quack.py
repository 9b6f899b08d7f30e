"""QuACK's CuTe-DSL matrix product, tuned by its own autotuner (`gemm(..., tuned=True)`).

Also with epilogues that QuACK has: a bias and GELU, a residual, SwiGLU. Symmetric products are
`gemm_symmetric`'s, which has one tile. Its wheels are large (nvidia-cutlass-dsl-libs-cu13 4.8.1
alone is 92 MB), so it runs only where they are installed.
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
            raise Unsupported("it needs rows of a multiple of 16 bytes")
        if epilogue not in _CALLS:
            raise Unsupported(f"it has no {epilogue.value}")
        library, sets = import_module("quack.gemm_interface"), setting.operands.sets
        call = _symmetric if problem.operation.symmetric else _CALLS[epilogue]
        calls = [call(library, tensors) for tensors in sets]

        def launch(i: int) -> torch.Tensor:
            calls[i % len(sets)]()
            return sets[i % len(sets)].d

        launch(0)  # tunes and compiles
        return Ready(launch=launch)


def _bare(library: Any, tensors: OperandSet) -> Call:
    if tensors.d.shape[0] > 1:
        return lambda: library.gemm(tensors.a, tensors.b, out=tensors.d, tuned=True)
    return lambda: library.gemm(tensors.a[0], tensors.b[0], out=tensors.d[0], tuned=True)


def _symmetric(library: Any, tensors: OperandSet) -> Call:
    if tensors.d.shape[0] > 1:
        return lambda: library.gemm_symmetric(tensors.a, tensors.b, out=tensors.d)
    return lambda: library.gemm_symmetric(tensors.a[0], tensors.b[0], out=tensors.d[0])


def _gelu(library: Any, tensors: OperandSet) -> Call:
    assert tensors.bias is not None
    bias = tensors.bias.view(-1)
    return lambda: library.gemm_act(
        *(tensors.a[0], tensors.b[0]),
        bias=bias,
        activation="gelu_tanh_approx",
        postact_out=tensors.d[0],
        store_preact=False,
        tuned=True,
    )


def _swiglu(library: Any, tensors: OperandSet) -> Call:
    # QuACK's kernels take alternating rows of gate and up, so they get a copy of the weight.
    weight = tensors.b[0].mT
    rows, width = weight.shape
    interleaved = weight.reshape(2, rows // 2, width).transpose(0, 1).reshape(rows, width).mT
    return lambda: library.gemm_act(
        *(tensors.a[0], interleaved),
        activation="swiglu",
        postact_out=tensors.d[0],
        store_preact=False,
        tuned=True,
    )


def _residual(library: Any, tensors: OperandSet) -> Call:
    assert tensors.residual is not None
    bias = None if tensors.bias is None else tensors.bias.view(-1)
    residual = tensors.residual[0]
    return lambda: library.gemm_add(
        tensors.a[0], tensors.b[0], residual, out=tensors.d[0], bias=bias, tuned=True
    )


_CALLS: dict[Epilogue, Callable[[Any, OperandSet], Call]] = {
    Epilogue.NONE: _bare,
    Epilogue.BIAS_GELU_TANH: _gelu,
    Epilogue.SILU_GATE: _swiglu,
    Epilogue.RESIDUAL: _residual,
    Epilogue.BIAS_RESIDUAL: _residual,
}
