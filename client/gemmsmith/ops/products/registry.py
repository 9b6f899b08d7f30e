"""Torch's library `gemmsmith`: how an operator of ours becomes one of torch's."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad

from gemmsmith.ops.engine import observers
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.forms import Spec
from gemmsmith.ops.engine.in_use import current
from gemmsmith.ops.engine.observers import DENSE, is_traced, keys_of

_REAL = (torch.Tensor, torch.nn.Parameter)
_TORCHS = (*_REAL, FakeTensor, FunctionalTensor)
_LIBRARY = torch.library.Library("gemmsmith", "DEF")  # type: ignore[no-untyped-call]
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCPU
)


class CallWay(Enum):
    """How a call with some tensors runs."""

    TORCH = "torch"  # by torch's operators alone
    OPERATOR = "operator"  # by an operator `gemmsmith::…`, for what compiles, traces or records
    EAGER = "eager"  # past torch's dispatcher: only autograd and autocast are to be served


def way_of(*arguments: object) -> CallWay:
    """How a call with these arguments runs, by the tensors among them.

    Kernels of ours compute with torch's own dense tensors, while nothing but reverse-mode autograd
    and autocast follows the operators: no forward-mode AD, no transform of `torch.func`, and no
    dispatch mode of the program.
    """
    if forward_ad._current_level >= 0:
        return CallWay.TORCH
    if torch.compiler.is_compiling():
        if torch._C._are_functorch_transforms_active():
            return CallWay.TORCH
        for argument in arguments:
            # A tracer cannot read `layout` in the backward pass of an autograd function.
            if isinstance(argument, torch.Tensor) and (
                type(argument) not in _TORCHS or argument.is_sparse
            ):
                return CallWay.TORCH
        return CallWay.OPERATOR
    # In the usual case, nothing observes, one question answers this and `is_watched`.
    is_eager = observers.unobserved()
    if not is_eager and observers.is_watched():
        return CallWay.TORCH
    for argument in arguments:
        if argument is None:
            continue
        if type(argument) in _REAL:
            # As `observers.is_dense`, without a call for each tensor of each layer.
            if keys_of(argument).raw_repr() not in DENSE:  # type: ignore[arg-type]
                return CallWay.TORCH
        elif isinstance(argument, torch.Tensor) and not (
            is_traced(argument) and argument.layout is torch.strided
        ):
            return CallWay.TORCH
    return CallWay.EAGER if is_eager else CallWay.OPERATOR


def ours(*arguments: object) -> bool:
    """Whether kernels of ours may compute with the tensors among these; see `way_of`."""
    return way_of(*arguments) is not CallWay.TORCH


def are_torchs(*arguments: object) -> bool:
    """Whether no tensor among these is another library's, or sparse."""
    return all(
        type(tensor) in _TORCHS and tensor.layout is torch.strided
        for tensor in arguments
        if isinstance(tensor, torch.Tensor)
    )


def wants_gradient(*arguments: object) -> bool:
    """Whether autograd is on and needs the gradient of a tensor among these."""
    if torch.is_grad_enabled():
        for argument in arguments:  # no `any`: this is asked at every call
            if isinstance(argument, torch.Tensor) and argument.requires_grad:
                return True
    return False


def cast(tensor: torch.Tensor | None, dtype: torch.dtype) -> Any:
    """The tensor as autocast hands it to a product."""
    if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)


def as_cast(tensor: torch.Tensor) -> torch.Tensor | Spec:
    """An operand, or its description after autocast, if autocast is enabled."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or tensor.dtype is torch.float64:
        return tensor
    return Spec.of(tensor)._replace(dtype=torch.get_autocast_dtype(kind))


def autocast(first: torch.Tensor, *others: torch.Tensor | None) -> tuple[Any, ...]:
    """The operands as autocast hands them to a product, if it is on for the first one's device."""
    kind = first.device.type
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return (first, *others)
    dtype = torch.get_autocast_dtype(kind)
    return tuple(cast(operand, dtype) for operand in (first, *others))


def fused_or_composed(
    kind: Callable[..., Any], run_composed: Callable[..., Any]
) -> Callable[..., Any]:
    """The part for autograd of an operator that one kernel may compute.

    Args:
        kind: makes a record of the operator's arguments, with a method `run_if_fused`.
        run_composed: gives the result if no kernel computes all of it.
    """

    def autograd(way: CallWay, engine: Engine | None, *arguments: Any) -> Any:
        d = kind(*arguments).run_if_fused(way, engine)
        return run_composed(*arguments) if d is None else d

    return autograd


def register(
    schema: str,
    compute: Callable[..., Any],
    fake: Callable[..., Any],
    autograd: Callable[..., Any] | None = None,
    *,
    by_torch: Callable[..., Any] | None = None,
    needs_engine: bool = False,
    casts: int = 0,
    advice: str = "",
) -> Callable[..., Any]:
    """Make an operator `gemmsmith::…`. Returns the function that programs call.

    The function runs the operator, or does what the operator would past torch's dispatcher, or
    leaves the call to torch: see `CallWay`.

    Args:
        schema: in torch's language.
        compute: gives the result on a device. Below autograd.
        fake: gives the result without data.
        autograd: gives the result with its gradients; takes the way and the engine first.
        by_torch: gives the result by torch's operators alone.
        needs_engine: whether all calls without an engine are left to torch.
        casts: how many arguments autocast casts, from the first on.
        advice: what to do instead, for an operator without a gradient.
    """
    # `torch.library.custom_op` would do, but calls cost 10 µs instead of 3 (torch 2.13).
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, compute, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"gemmsmith::{name}", fake, lib=_LIBRARY)

    def without_autograd(_way: CallWay, _engine: Engine | None, *arguments: Any) -> Any:
        return compute(*arguments)

    eager = without_autograd if autograd is None else autograd

    def with_casts(way: CallWay, engine: Engine | None, *arguments: Any) -> Any:
        dtype = torch.get_autocast_dtype(arguments[0].device.type)
        operands = (cast(operand, dtype) for operand in arguments[:casts])
        return eager(way, engine, *operands, *arguments[casts:])

    def under_autograd(*arguments: Any) -> Any:
        return eager(CallWay.OPERATOR, current(), *arguments)

    def under_autocast(*arguments: Any) -> Any:
        # Without the guard the operator, called again on what was cast, would come here for ever.
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return with_casts(CallWay.OPERATOR, current(), *arguments)

    if advice:
        _LIBRARY.impl(name, _without_gradient(name, advice), "Autograd")  # type: ignore[no-untyped-call]
    elif autograd is not None:
        _LIBRARY.impl(name, under_autograd, "Autograd")  # type: ignore[no-untyped-call]
    for kind in ("AutocastCUDA", "AutocastCPU") if casts else ():
        _LIBRARY.impl(name, under_autocast, kind)  # type: ignore[no-untyped-call]

    def call(*arguments: Any) -> Any:
        engine, way = current(), way_of(*arguments)
        if by_torch is not None and (way is CallWay.TORCH or (needs_engine and engine is None)):
            return by_torch(*arguments)
        if by_torch is not None and not (
            isinstance(arguments[0], torch.Tensor) and isinstance(arguments[1], torch.Tensor)
        ):
            return by_torch(*arguments)  # which raises torch's own error
        # Tracers and recorders see calls of the dispatcher alone.
        if way is CallWay.OPERATOR:
            return getattr(torch.ops.gemmsmith, name)(*arguments)
        if casts and torch.is_autocast_enabled(arguments[0].device.type):
            return with_casts(way, engine, *arguments)
        return eager(way, engine, *arguments)

    return call


def _without_gradient(name: str, advice: str) -> Callable[..., torch.Tensor]:
    """Autograd's part of an operator that has no gradient.

    Raises:
        NotImplementedError: when called with an operand that requires one.
    """

    def autograd(*arguments: Any) -> torch.Tensor:
        refuse_gradient(name, advice, *arguments)
        with torch._C._AutoDispatchBelowAutograd():
            result: torch.Tensor = getattr(torch.ops.gemmsmith, name)(*arguments)
            return result

    return autograd


def refuse_gradient(name: str, advice: str, *arguments: object) -> None:
    """Raises NotImplementedError if autograd needs the gradient of one of the arguments."""
    if wants_gradient(*arguments):
        raise NotImplementedError(f"{name} has no gradient: {advice}")
