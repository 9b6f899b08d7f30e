"""Replaces torch's own products by tuned kernels if the compiled binding is not available.

A torch function mode intercepts `F.linear` and the products of `torch` in this thread, which costs
one to two microseconds for every call of any torch function. All calls that are not products of
ours run torch's own operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from gemmsmith.ops.below.adding import PRODUCTS, by_kernel
from gemmsmith.ops.engine import observers
from gemmsmith.ops.engine.in_use import current
from gemmsmith.ops.products import integer, operators
from gemmsmith.ops.products.registry import wants_gradient


def _mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return operators.matmul(a, b) if a.dim() == b.dim() == 2 else torch.mm(a, b)


def _bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    plain = a.dim() == b.dim() == 3 and a.shape[0] == b.shape[0]
    return operators.matmul(a, b) if plain else torch.bmm(a, b)


def _addmm(added: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    # A vector that is added to every row is a linear layer's bias.
    if added.dim() == 1 and a.dim() == b.dim() == 2 and added.shape[0] == b.shape[1]:
        return operators.linear(a, b.t(), added)
    return torch.addmm(added, a, b)


def _int_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    plain = a.dtype == b.dtype == torch.int8 and a.dim() == b.dim() == 2
    ours = plain and a.device == b.device and a.shape[1] == b.shape[0]
    return integer.int8_mm(a, b, out_dtype=torch.int32) if ours else torch._int_mm(a, b)


def _rmatmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return operators.matmul(b, a)


_REPLACED: dict[Any, tuple[Callable[..., torch.Tensor], tuple[str, ...]]] = {
    functional.linear: (operators.linear, ("input", "weight", "bias")),
    torch.matmul: (operators.matmul, ("input", "other")),
    torch.Tensor.matmul: (operators.matmul, ("self", "other")),
    torch.Tensor.__matmul__: (operators.matmul, ("self", "other")),
    torch.Tensor.__rmatmul__: (_rmatmul, ("self", "other")),
    torch.mm: (_mm, ("input", "mat2")),
    torch.Tensor.mm: (_mm, ("self", "mat2")),
    torch.bmm: (_bmm, ("input", "mat2")),
    torch.Tensor.bmm: (_bmm, ("self", "mat2")),
    torch._int_mm: (_int_mm, ("self", "mat2")),
    torch.addmm: (_addmm, ("input", "mat1", "mat2")),
    torch.Tensor.addmm: (_addmm, ("self", "mat1", "mat2")),
}


_WIDE: dict[Any, tuple[int, int]] = {
    getattr(torch, name): (int(adds), dims) for name, dims, adds in PRODUCTS
}
"""For calls with `out_dtype`: the number of tensors before the product's operands, and the number
of dimensions of all tensors."""


def _wide(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The product in `out_dtype` by a kernel; None if torch has to compute it."""
    engine, (before, dims) = current(), _WIDE[func]
    rest = dict(kwargs)
    output, out = rest.pop("out_dtype"), rest.pop("out", None)
    if (
        engine is None
        or len(args) != before + 2
        or not rest.keys() <= {"alpha", "beta"}
        or torch.compiler.is_compiling()
        or not observers.unobserved()
        or wants_gradient(*args)
        or any(tensor.dim() != dims for tensor in args)
    ):
        return None
    return by_kernel(engine, args[-2], args[-1], output, args[0] if before else None, rest, out)


def _is_checkpointed() -> bool:
    """Whether hooks decide what is saved for the backward pass, as in activation checkpointing."""
    if torch.compiler.is_compiling():  # graphs have their own checkpointing
        return False
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


class Everywhere(TorchFunctionMode):
    """Replaces every product of this thread while the mode is active."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # A checkpointed region is computed again in the backward pass, where modes are inactive. It
        # must save the same tensors both times.
        replaced = None if _is_checkpointed() else _REPLACED.get(func)
        kwargs = kwargs or {}
        if func in _WIDE and "out_dtype" in kwargs:
            d = _wide(func, args, kwargs)
            return func(*args, **kwargs) if d is None else d
        if replaced is not None:
            replacement, names = replaced
            values = [*args, *(kwargs[name] for name in names[len(args) :] if name in kwargs)]
            # Calls with `out`, `alpha`, `beta`, or a number instead of a tensor are torch's.
            if len(values) == len(args) + len(kwargs) and all(
                isinstance(value, torch.Tensor) or value is None for value in values
            ):
                return replacement(*values)
        return func(*args, **kwargs)
