"""Triton's matrix products as torch.compile generates them in mode max-autotune.

Inductor is limited to its Triton templates (with TMA if it has them); otherwise it would call
cuBLAS where that is faster. The generated code is searched for library calls. The compiled function
allocates its D, because a copy into ours would count as Triton's time. For K ≥ 32 · M, N Inductor
would only try slices of K multiplied by cuBLAS ("decompose_k"), so that is switched off.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from benchmarks.peers.peer import Ready, Setting, Unsupported, missing

if TYPE_CHECKING:
    import torch

_LIBRARY_CALL = re.compile(r"extern_kernels\.\w+\(|aten\.\w*mm\w*\.(?:out|default)\(")
MODE = "max-autotune-no-cudagraphs"
"""Without CUDA graphs, because the measurement captures its own."""


class Triton:
    """`torch.compile(torch.mm)` (bmm, _scaled_mm) with Triton as the only backend."""

    name = "triton"
    limit_s = 300.0

    def available(self) -> str | None:
        return missing("torch", "triton")

    def prepare(self, setting: Setting) -> Ready:
        if setting.problem.operation.is_fused:
            raise Unsupported("it is measured for products without epilogues only")
        import torch
        from torch._inductor import config
        from torch._inductor.utils import run_and_get_code

        config.max_autotune_gemm_backends = "TRITON"
        config.triton.num_decompose_k_splits = 0
        if hasattr(config.triton, "enable_persistent_tma_matmul"):
            config.triton.enable_persistent_tma_matmul = True
        operands = setting.operands
        inputs = [_inputs(tensors.a, tensors.b) for tensors in operands.sets]
        product = _product(setting)
        compiled: Callable[..., torch.Tensor] = torch.compile(
            product, mode=MODE, dynamic=False, fullgraph=True
        )
        with torch.no_grad():
            _, codes = run_and_get_code(compiled, *inputs[0])
        kernels = generated_by_triton("\n".join(codes))
        outputs: list[Any] = [None] * len(inputs)  # kept until the same set is launched again

        def launch(i: int) -> torch.Tensor:
            at = i % len(inputs)
            with torch.no_grad():
                outputs[at] = compiled(*inputs[at])
            result: torch.Tensor = outputs[at]
            return result

        return Ready(launch=launch, note=", ".join(kernels))


def generated_by_triton(code: str) -> list[str]:
    """Return the names of the Triton kernels in Inductor's output code.

    Raises:
        Unsupported: the code has no Triton kernel, or a library call computes the product.
    """
    called = _LIBRARY_CALL.search(code)
    if called:
        raise Unsupported(f"Inductor fell back to {called[0].rstrip('(')}")
    kernels = sorted(set(re.findall(r"\b(triton_\w+)\.run\(", code)))
    if not kernels:
        raise Unsupported("Inductor generated no Triton kernel")
    return kernels


def _inputs(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (a, b) if a.shape[0] > 1 else (a[0], b[0])


def _product(setting: Setting) -> Callable[[Any, Any], Any]:
    import torch

    from tuner.workloads.scaled import factors

    problem = setting.problem
    if not problem.operation.is_narrow_float:
        multiply = torch.bmm if problem.batch > 1 else torch.mm
        return lambda a, b: multiply(a, b)  # Dynamo needs a Python function
    if problem.batch > 1:
        raise Unsupported("torch._scaled_mm has no batched form")
    if problem.k % 16 or problem.n % 16:
        raise Unsupported("torch._scaled_mm needs K and N that are multiples of 16")
    scale_a, scale_b = factors(setting.operands.sets[0])

    def scaled(a: Any, b: Any) -> Any:
        return torch._scaled_mm(
            a,
            b,
            scale_a=scale_a,
            scale_b=scale_b,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )

    return scaled
