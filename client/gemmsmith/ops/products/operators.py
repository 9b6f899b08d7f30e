"""`gemmsmith.matmul`, `linear` and `scaled_mm`: torch's operators with tuned kernels inside.

They take what torch's take and give what torch's give. What is not a plain product of one matrix,
or of two equal batches, in a type that kernels exist for, is torch's own operator's. Each is also
an operator `gemmsmith::…` with a fake implementation, a gradient and an autocast rule, which is
what compiled graphs hold; eager calls on ordinary tensors do not go through the dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from gemmsmith.ops.below import scaling
from gemmsmith.ops.engine import fallback, functions, observers
from gemmsmith.ops.engine.engine import current
from gemmsmith.ops.engine.forms import SCALED_TYPES, Form
from gemmsmith.ops.products.registry import ours, register, without_gradient


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    main_grad: torch.Tensor | None = None,
) -> torch.Tensor:
    """`torch.nn.functional.linear`: x[..., K] · weight[N, K]ᵀ + bias[N].

    Args:
        x: any number of leading dimensions.
        weight: [N, K].
        bias: [N]; None adds nothing.
        main_grad: [N, K], usually FP32: the weight's gradient is added to it in the backward pass,
            and `weight.grad` is not changed, as in Megatron's gradient accumulation.

    Raises:
        ValueError: main_grad does not have the weight's shape or device, or requires a gradient.
        RuntimeError: raised by torch if sizes or types do not match.
    """
    if main_grad is not None:
        check_main_grad(main_grad, weight)
    if not ours(x, weight, bias, main_grad):
        if main_grad is None:
            return functional.linear(x, weight, bias)
        x, weight, bias = autocast(x, weight, bias)
        out: torch.Tensor = functions.Linear.apply(x, weight, bias, main_grad, None)  # type: ignore[no-untyped-call]
        return out
    if current() is None and main_grad is None:
        return functional.linear(x, weight, bias)
    if torch.compiler.is_compiling() or not observers.unobserved():
        result: torch.Tensor = torch.ops.gemmsmith.linear(x, weight, bias, main_grad)
        return result
    if torch.is_autocast_enabled(x.device.type):
        return _linear_autocast(x, weight, bias, main_grad)
    return _linear_autograd(x, weight, bias, main_grad)


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`torch.matmul`: a[..., M, K] · b[K, N], or equal batches of both; broadcasts like torch.

    Raises:
        RuntimeError: raised by torch if sizes or types do not match.
    """
    if current() is None or not ours(a, b) or not _multiplies_plainly(a, b):
        return torch.matmul(a, b)
    if torch.compiler.is_compiling() or not observers.unobserved():
        result: torch.Tensor = torch.ops.gemmsmith.matmul(a, b)
        return result
    if torch.is_autocast_enabled(a.device.type):
        return _matmul_autocast(a, b)
    return _matmul_autograd(a, b)


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """`scale_a · scale_b · a[M, K] · b[K, N] + bias[N]` of FP8 operands.

    Args:
        a: E4M3 or E5M2, row-major.
        b: E4M3, column-major: for a weight [N, K], pass `weight.t()`.
        scale_a: FP32 on the operands' device: one element, or [M, 1], one for each row of a.
        scale_b: likewise: one element, or [1, N], one for each column of b. Either both scales are
            one element, or none is (M or N of 1 apart).
        bias: [N]; None adds nothing. With factors of rows and columns it is torch's to add.
        out_dtype: tuned kernels give bf16; torch computes other types.
        use_fast_accum: as in torch: sums may stay in the tensor core, with fewer bits than FP32,
            for all of K. Most FP8 winners do so, and are measured against cuBLAS doing so. Without
            it, only kernels that promote their sums to FP32 run, or else torch.

    FP8 values have no gradient: cast and scale inside an autograd function, and compute the
    products of its backward pass by this function as well (`fp8_e5m2`).

    Raises:
        ValueError: the scales are not FP32 on the operands' device, or have other sizes.
        RuntimeError: raised by torch if sizes or types do not match.
    """
    _check_scales(a, b, scale_a, scale_b)
    matrices = (a.dtype, b.dtype) in SCALED_TYPES and a.dim() == b.dim() == 2
    if not matrices or not ours(a, b, scale_a, scale_b, bias):
        return fallback.scaled_by_torch(a, b, scale_a, scale_b, bias, out_dtype, use_fast_accum)
    if torch.compiler.is_compiling() or not observers.unobserved():
        result: torch.Tensor = torch.ops.gemmsmith.scaled_mm(
            a, b, scale_a, scale_b, bias, out_dtype, use_fast_accum
        )
        return result
    return _scaled_mm(a, b, scale_a, scale_b, bias, out_dtype, use_fast_accum)


def _check_scales(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor
) -> None:
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        if scale.dtype != torch.float32 or scale.device != a.device:
            raise ValueError(
                f"{name} must be float32 on {a.device}, got {scale.dtype} on {scale.device}"
            )
    if scaling.scales_rows(a, b, scale_a, scale_b) is None:
        raise ValueError(
            f"the scales must be one element each, or [M, 1] and [1, N] of a[M, K] and b[K, N], "
            f"got {tuple(scale_a.shape)} and {tuple(scale_b.shape)} for {tuple(a.shape)} and "
            f"{tuple(b.shape)}"
        )


def _multiplies_plainly(a: torch.Tensor, b: torch.Tensor) -> bool:
    if b.dim() == 2:
        return a.dim() >= 2
    return a.dim() == b.dim() > 2 and a.shape[:-2] == b.shape[:-2]


def check_main_grad(main_grad: torch.Tensor, weight: torch.Tensor) -> None:
    """Refuse what no weight's gradient can be added to.

    Raises:
        ValueError: as `linear` says.
    """
    if main_grad.shape != weight.shape or main_grad.device != weight.device:
        raise ValueError(
            f"main_grad must be {tuple(weight.shape)} on {weight.device}, like the weight, got "
            f"{tuple(main_grad.shape)} on {main_grad.device}"
        )
    if main_grad.requires_grad:
        raise ValueError("main_grad must not require a gradient: it holds one")


# Autograd's part: also what an eager call does.


def _linear_autograd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    main_grad: torch.Tensor | None = None,
) -> torch.Tensor:
    engine = current()
    plan, symbolic = None, False
    if engine is not None:
        symbolic = not functions.sizes_are_numbers(x, weight)
        if not symbolic:
            plan = engine.plan(Form.LINEAR if bias is None else Form.LINEAR_BIAS, x, weight)
    wanted = torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    if not wanted:
        return functions.linear_below(x, weight, bias, plan)
    is_ours = plan is not None or symbolic or main_grad is not None or functions.is_reported(engine)
    if not is_ours and (engine is None or not functions.gradients_have_kernel(engine, x, weight)):
        return functional.linear(x, weight, bias)
    out: torch.Tensor = functions.Linear.apply(x, weight, bias, main_grad, plan)  # type: ignore[no-untyped-call]
    return out


def _matmul_autograd(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if not (torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)):
        return functions.product(Form.MATMUL, a, b)
    engine = current()
    is_ours = functions.is_reported(engine)
    if not is_ours and (engine is None or not functions.matmul_has_kernel(engine, a, b)):
        return torch.matmul(a, b)
    out: torch.Tensor = functions.Matmul.apply(a, b)  # type: ignore[no-untyped-call]
    return out


# Autocast's part: as for torch's own linear and matmul.


def cast(tensor: torch.Tensor | None, dtype: torch.dtype) -> Any:
    """The tensor as autocast hands it to a product."""
    if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)


def autocast(first: torch.Tensor, *others: torch.Tensor | None) -> tuple[Any, ...]:
    """The operands as autocast hands them to a product, if it is on for the first one's device."""
    kind = first.device.type
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return (first, *others)
    dtype = torch.get_autocast_dtype(kind)
    return tuple(cast(one, dtype) for one in (first, *others))


def _linear_autocast(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    main_grad: torch.Tensor | None = None,
) -> torch.Tensor:
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind)
    return _linear_autograd(cast(x, dtype), cast(weight, dtype), cast(bias, dtype), main_grad)


def _matmul_autocast(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    dtype = torch.get_autocast_dtype(a.device.type)
    return _matmul_autograd(cast(a, dtype), cast(b, dtype))


# The devices' part: what a compiled graph calls.


def _linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    main_grad: torch.Tensor | None = None,  # noqa: ARG001 - the gradient's affair
) -> torch.Tensor:
    form = Form.LINEAR if bias is None else Form.LINEAR_BIAS
    engine = current()
    out = None
    if engine is not None:
        plan = engine.plan(form, x, weight)
        out = functions.linear_by_kernel(engine, plan, x, weight, bias)
    return functional.linear(x, weight, bias).contiguous() if out is None else out


def _product(form: Form) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def compute(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        engine = current()
        out = engine.product(form, a, b) if engine is not None else None
        return fallback.product(form, a, b).contiguous() if out is None else out

    return compute


def _scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    engine = current()
    # Vectors of any stride are few bytes to copy.
    scale_a, scale_b = scale_a.contiguous(), scale_b.contiguous()
    # Torch's own comes to the same kernel where a block of `patch` is open, and is told of once.
    torchs = scaling.takes(a, b) and fallback.torch_scales(a, b)
    # No kernel writes another type; a pass of its own for a bias seldom pays.
    if engine is not None and out_dtype == torch.bfloat16 and not torchs:
        out = scaling.by_kernel(engine, a, b, scale_a, scale_b, bias, fast=use_fast_accum)
        if out is not None:
            return out
    return fallback.scaled(a, b, scale_a, scale_b, bias, out_dtype, use_fast_accum)


# Shapes alone, for whoever traces.


def _linear_fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,  # noqa: ARG001 - does not change the shape
    main_grad: torch.Tensor | None = None,  # noqa: ARG001 - likewise
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _matmul_fake(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[-1]))


def _weight_gradient_fake(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.new_empty((a.shape[-1], b.shape[-1]))


def _accumulate_fake(into: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    pass


def _scaled_mm_fake(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,  # noqa: ARG001 - does not change the shape
    scale_b: torch.Tensor,  # noqa: ARG001 - likewise
    bias: torch.Tensor | None = None,  # noqa: ARG001 - likewise
    out_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,  # noqa: ARG001 - likewise
) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


register(
    "linear(Tensor x, Tensor weight, Tensor? bias=None, Tensor? main_grad=None) -> Tensor",
    _linear,
    _linear_fake,
    _linear_autograd,
    _linear_autocast,
)
register(
    "matmul(Tensor a, Tensor b) -> Tensor",
    _product(Form.MATMUL),
    _matmul_fake,
    _matmul_autograd,
    _matmul_autocast,
)
register(
    "scaled_mm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias=None, "
    "ScalarType out_dtype=bfloat16, bool use_fast_accum=False) -> Tensor",
    _scaled_mm,
    _scaled_mm_fake,
    without_gradient("scaled_mm", "call it inside an autograd function that casts to FP8"),
)
register(
    "weight_gradient(Tensor a, Tensor b) -> Tensor",
    _product(Form.WEIGHT_GRADIENT),
    _weight_gradient_fake,
)
register(
    "accumulate(Tensor(a!) into, Tensor a, Tensor b) -> ()",
    functions.accumulate_below,
    _accumulate_fake,
)
