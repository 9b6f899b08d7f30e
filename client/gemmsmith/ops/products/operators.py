"""`gemmsmith.matmul`, `linear` and `scaled_mm`: torch's operators with tuned kernels inside.

They take torch's arguments and return torch's results. Kernels compute plain products of one matrix
or of two equal batches, in the types that they exist for; torch's operators compute the rest. Each
function is also an operator `gemmsmith::…` with a fake implementation, a gradient and an autocast
rule, for compiled graphs. Eager calls on ordinary tensors do not go through torch's dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from gemmsmith.ops.below import scaling
from gemmsmith.ops.engine import fallback, functions
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.forms import SCALED_TYPES, Form, Spec
from gemmsmith.ops.engine.in_use import current
from gemmsmith.ops.products.registry import CallWay, as_cast, autocast, register, wants_gradient


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
    elif current() is None:
        return functional.linear(x, weight, bias)
    result: torch.Tensor = _linear(x, weight, bias, main_grad)
    return result


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`torch.matmul`: a[..., M, K] · b[K, N], or equal batches of both; broadcasts like torch.

    Raises:
        RuntimeError: raised by torch if sizes or types do not match.
    """
    result: torch.Tensor = (_matmul if _multiplies_plainly(a, b) else torch.matmul)(a, b)
    return result


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
        scale_b: FP32: one element, or [1, N], one for each column of b. Either both scales are one
            element, or neither is, except for M or N of 1.
        bias: [N]; None adds nothing. With factors of rows and columns torch adds it.
        out_dtype: tuned kernels write bf16; torch computes other types.
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
    are_matrices = (a.dtype, b.dtype) in SCALED_TYPES and a.dim() == b.dim() == 2
    multiply = _scaled_mm if are_matrices else fallback.scaled_by_torch
    result: torch.Tensor = multiply(a, b, scale_a, scale_b, bias, out_dtype, use_fast_accum)
    return result


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
    """Raises ValueError if the weight's gradient cannot be added to `main_grad`; see `linear`."""
    if main_grad.shape != weight.shape or main_grad.device != weight.device:
        raise ValueError(
            f"main_grad must be {tuple(weight.shape)} on {weight.device}, like the weight, got "
            f"{tuple(main_grad.shape)} on {main_grad.device}"
        )
    if main_grad.requires_grad:
        raise ValueError("main_grad must not require a gradient: it holds one")


# With gradients: the part for autograd, which eager calls run too.


def _linear_autograd(
    way: CallWay,
    engine: Engine | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    main_grad: torch.Tensor | None = None,
) -> torch.Tensor:
    plan, symbolic = None, False
    if engine is not None:
        symbolic = way is not CallWay.EAGER and not functions.sizes_are_numbers(x, weight)
        if not symbolic:
            plan = engine.plan(Form.LINEAR if bias is None else Form.LINEAR_BIAS, x, weight)
    if not wants_gradient(x, weight, bias):
        if way is CallWay.EAGER:
            return functions.run_linear(engine, x, weight, bias, plan)
        return functions.linear_below(engine, x, weight, bias, plan)
    is_ours = plan is not None or symbolic or main_grad is not None or functions.is_reported(engine)
    if not is_ours and (engine is None or not functions.gradients_have_kernel(engine, x, weight)):
        return functional.linear(x, weight, bias)
    d: torch.Tensor = functions.Linear.apply(x, weight, bias, main_grad, plan)  # type: ignore[no-untyped-call]
    return d


Product = tuple[Form, torch.Tensor | Spec, torch.Tensor | Spec]


def products_of_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, forward_only: bool
) -> list[Product]:
    """The products of a linear layer, and of its gradients if autograd needs any.

    Args:
        x: as of `linear`.
        weight: as of `linear`.
        bias: as of `linear`.
        forward_only: leave out those of gradients.
    """
    a, b = as_cast(x), as_cast(weight)
    products: list[Product] = [(Form.LINEAR if bias is None else Form.LINEAR_BIAS, a, b)]
    is_matrix = x.dim() >= 2 and weight.dim() == 2
    if is_matrix and not forward_only and wants_gradient(x, weight, bias):
        dy = functions.contiguous(a, (*x.shape[:-1], weight.shape[0]))
        products += [(Form.MATMUL, dy, b), (Form.WEIGHT_GRADIENT, dy, a)]
    return products


def _linear_by_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    main_grad: torch.Tensor | None,
) -> torch.Tensor:
    if main_grad is None:
        return functional.linear(x, weight, bias)
    x, weight, bias = autocast(x, weight, bias)
    d: torch.Tensor = functions.Linear.apply(x, weight, bias, main_grad, None)  # type: ignore[no-untyped-call]
    return d


def _matmul_autograd(
    _way: CallWay, engine: Engine | None, a: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    if not wants_gradient(a, b):
        return functions.product(Form.MATMUL, a, b)
    is_ours = functions.is_reported(engine)
    if not is_ours and (engine is None or not functions.matmul_has_kernel(engine, a, b)):
        return torch.matmul(a, b)
    d: torch.Tensor = functions.Matmul.apply(a, b)  # type: ignore[no-untyped-call]
    return d


# On a device: what a compiled graph calls.


def _linear_compute(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    main_grad: torch.Tensor | None = None,  # noqa: ARG001 - the forward pass does not use it
) -> torch.Tensor:
    form, engine = Form.LINEAR if bias is None else Form.LINEAR_BIAS, current()
    plan = None if engine is None else engine.plan(form, x, weight)
    return functions.run_linear(engine, x, weight, bias, plan).contiguous()


def _product_compute(form: Form) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def compute(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        engine = current()
        d = engine.product(form, a, b) if engine is not None else None
        return fallback.product(form, a, b).contiguous() if d is None else d

    return compute


def _scaled_mm_compute(
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
    # While `patch` replaces torch's operator, that runs the same kernel and is counted once.
    is_replaced = scaling.takes(a, b) and fallback.torch_scales(a, b)
    # No kernel writes another type; a pass of its own for a bias seldom pays.
    if engine is not None and out_dtype == torch.bfloat16 and not is_replaced:
        d = scaling.by_kernel(engine, a, b, scale_a, scale_b, bias, fast=use_fast_accum)
        if d is not None:
            return d
    return fallback.scaled(a, b, scale_a, scale_b, bias, out_dtype, use_fast_accum)


def _scaled_mm_fake(
    a: torch.Tensor,
    b: torch.Tensor,
    _scale_a: torch.Tensor,
    _scale_b: torch.Tensor,
    _bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    _use_fast_accum: bool = False,
) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


_linear = register(
    "linear(Tensor x, Tensor weight, Tensor? bias=None, Tensor? main_grad=None) -> Tensor",
    _linear_compute,
    lambda x, weight, *_: x.new_empty((*x.shape[:-1], weight.shape[0])),
    _linear_autograd,
    by_torch=_linear_by_torch,
    casts=3,
)
_matmul = register(
    "matmul(Tensor a, Tensor b) -> Tensor",
    _product_compute(Form.MATMUL),
    lambda a, b: a.new_empty((*a.shape[:-1], b.shape[-1])),
    _matmul_autograd,
    by_torch=torch.matmul,
    needs_engine=True,
    casts=2,
)
_scaled_mm = register(
    "scaled_mm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias=None, "
    "ScalarType out_dtype=bfloat16, bool use_fast_accum=False) -> Tensor",
    _scaled_mm_compute,
    _scaled_mm_fake,
    by_torch=fallback.scaled_by_torch,
    advice="call it inside an autograd function that casts to FP8",
)
register(
    "weight_gradient(Tensor a, Tensor b) -> Tensor",
    _product_compute(Form.WEIGHT_GRADIENT),
    lambda a, b: a.new_empty((a.shape[-1], b.shape[-1])),
)
register(
    "accumulate(Tensor(a!) into, Tensor a, Tensor b) -> ()",
    functions.accumulate_below,
    lambda _into, _a, _b: None,
)
