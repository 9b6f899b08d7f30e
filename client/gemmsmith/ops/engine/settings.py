"""torch's global settings that forbid a kernel. Each call reads them, as torch's own products do.

A kernel runs only while torch's own product might be computed as the kernel computes it:

- `torch.use_deterministic_algorithms` (and its debug mode): sums in a fixed order only.
- TF32 (`allow_tf32`, `fp32_precision`, `set_float32_matmul_precision`): of FP32 operands.
- `allow_bf16_reduced_precision_reduction` and the same for fp16: no partial sums that are rounded
  to the output's type, and, if split-K is forbidden with them, no partial sums at all.

Other settings forbid nothing. `allow_fp16_accumulation` permits sums with fewer bits, and kernels
keep them in FP32. `preferred_blas_library`, TunableOp, and the sizes of workspaces choose among
other libraries' kernels, which differ by rounding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from gemmsmith.core.config import Config
from gemmsmith.core.operation import Element

Permission = Callable[[], bool]
"""Whether torch permits something at present, in this process."""

_precision = torch._C._get_fp32_precision_getter
_deterministic = torch._C._get_deterministic_algorithms


def allows_any_order() -> bool:
    return not _deterministic()


def allows_tf32() -> bool:
    """Whether torch multiplies FP32 matrices on CUDA in TF32."""
    return bool(_precision("cuda", "matmul") == "tf32")


def _of_matmul(name: str) -> Permission:
    # A torch without the setting forbids nothing.
    return lambda: bool(getattr(torch.backends.cuda.matmul, name, True))


_ROUNDED = {
    Element.BF16: _of_matmul("allow_bf16_reduced_precision_reduction"),
    Element.F16: _of_matmul("allow_fp16_reduced_precision_reduction"),
}
_SPLIT = {
    Element.BF16: _of_matmul("allow_bf16_reduced_precision_reduction_split_k"),
    Element.F16: _of_matmul("allow_fp16_reduced_precision_reduction_split_k"),
}

PERMISSIONS = (allows_any_order, allows_tf32, *_ROUNDED.values(), *_SPLIT.values())
"""Everything that a kernel may need."""


def needed(config: Config, *, fixed_order: bool) -> tuple[Permission, ...]:
    """What torch must permit whenever the kernel runs; empty for most.

    Args:
        config: kernel and launch.
        fixed_order: whether the order of every sum is fixed.
    """
    kernel, launch = config.kernel, config.launch
    element = kernel.operation.a
    needs: list[Permission | None] = [
        None if fixed_order else allows_any_order,
        allows_tf32 if element is Element.TF32 else None,
        _ROUNDED.get(element) if kernel.rounds_parts(launch) else None,
        _SPLIT.get(element) if kernel.splits_sums(launch) else None,
    ]
    return tuple(need for need in needs if need is not None)
