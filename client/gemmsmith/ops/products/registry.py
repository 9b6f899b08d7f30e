"""Torch's library `gemmsmith`: how an operator of ours becomes one of torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad

from gemmsmith.ops.engine import observers
from gemmsmith.ops.engine.observers import is_traced

_REAL = (torch.Tensor, torch.nn.Parameter)
_TORCHS = (*_REAL, FakeTensor, FunctionalTensor)
_LIBRARY = torch.library.Library("gemmsmith", "DEF")  # type: ignore[no-untyped-call]
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCPU
)


def ours(*tensors: torch.Tensor | None) -> bool:
    """Whether we may compute with these in place of torch; None is passed over.

    They must be torch's own dense tensors, and nothing but reverse-mode autograd and autocast may
    follow what is done with them: no forward-mode AD, no transform of `torch.func`, no dispatch
    mode of the program.
    """
    if forward_ad._current_level >= 0:
        return False
    if torch.compiler.is_compiling():
        # `layout` may not be asked for in the backward pass of an autograd function.
        return not torch._C._are_functorch_transforms_active() and all(
            one is None or (type(one) in _TORCHS and not one.is_sparse) for one in tensors
        )
    if observers.is_watched():
        return False
    for tensor in tensors:
        if tensor is None:
            continue
        if type(tensor) in _REAL:
            if not observers.is_dense(tensor):
                return False
        elif not is_traced(tensor) or tensor.layout is not torch.strided:
            return False
    return True


def are_torchs(*tensors: torch.Tensor | None) -> bool:
    """Whether none of these is another library's tensor, or sparse; None is passed over."""
    return all(
        one is None or (type(one) in _TORCHS and one.layout is torch.strided) for one in tensors
    )


def wants_gradient(*arguments: object) -> bool:
    """Whether autograd is on and one of the tensors among these takes part in it."""
    return torch.is_grad_enabled() and any(
        isinstance(one, torch.Tensor) and one.requires_grad for one in arguments
    )


def register(
    schema: str,
    compute: Callable[..., Any],
    fake: Callable[..., Any],
    autograd: Callable[..., Any] | None = None,
    autocast: Callable[..., Any] | None = None,
) -> None:
    """Make an operator `gemmsmith::…` of the functions for devices, tracers and what wraps them."""
    # `torch.library.custom_op` would do, but calls cost 10 µs instead of 3 (torch 2.13).
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, compute, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"gemmsmith::{name}", fake, lib=_LIBRARY)
    if autograd is not None:
        _LIBRARY.impl(name, autograd, "Autograd")  # type: ignore[no-untyped-call]
    if autocast is not None:

        def cast(*arguments: Any) -> Any:
            # Or the operator, called again on what was cast, would come by here for ever.
            with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
                return autocast(*arguments)

        for kind in ("AutocastCUDA", "AutocastCPU"):
            _LIBRARY.impl(name, cast, kind)  # type: ignore[no-untyped-call]


def without_gradient(name: str, advice: str) -> Callable[..., torch.Tensor]:
    """Autograd's part of an operator that has no gradient.

    Raises:
        NotImplementedError: when called with an operand that wants one.
    """

    def autograd(*arguments: Any) -> torch.Tensor:
        if wants_gradient(*arguments):
            raise NotImplementedError(f"{name} has no gradient: {advice}")
        with torch._C._AutoDispatchBelowAutograd():
            out: torch.Tensor = getattr(torch.ops.gemmsmith, name)(*arguments)
            return out

    return autograd
