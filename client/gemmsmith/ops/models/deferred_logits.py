"""Logits that are computed only if something other than a loss reads them.

A head returns `DeferredLogits`: the sizes, type and graph of its logits, without their values.
What models do to logits before the loss (casts, views, slices of rows, a softcap, a scale) is noted
as steps. `torch.nn.functional.cross_entropy` of the result becomes `linear_cross_entropy` of the
head's operands, and logits are never computed as a whole.

Autograd sees the steps as always, because values are missing only below it. So every other operator
computes the values once, with torch's own graph, and gradients of several uses add up. The operator
may be torch's or a library's, in Python or C++. The weight's logits are never deferred again then.

Values are always those of the forward pass. If the program still holds logits in the backward pass
of the loss, which comes before the weight changes, the weight is copied, or the logits are computed
if they take no more memory. From then on such logits are computed before the loss, which reads
them. An operand that has changed without a backward pass raises an error.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from gemmsmith.errors import GemmsmithError
from gemmsmith.ops.engine import functions
from gemmsmith.ops.models.deferred import Deferred, HeadCall
from gemmsmith.ops.models.deferred_losses import SCALES, cross_entropy

_aten = torch.ops.aten

_read: Any = WeakTensorKeyDictionary()
"""Weights whose logits a program has read. To compute them again would cost it time."""


def is_read(weight: torch.Tensor) -> bool:
    """Whether logits of the weight were deferred, and then read."""
    return weight in _read


class DeferredLogits(torch.Tensor):
    """Logits without values, which any operator computes."""

    deferred: Deferred

    @staticmethod
    def of(deferred: Deferred) -> DeferredLogits:
        like = deferred.like
        logits: DeferredLogits = torch.Tensor._make_wrapper_subclass(
            DeferredLogits,
            like.shape,
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            device=deferred.head.x.device,
        )
        logits.deferred = deferred
        return logits

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.cross_entropy and len(args) == 2:
            loss = cross_entropy(*args, kwargs)
            if loss is not None:
                return loss
        if func in _BY_ADDRESS or not _KNOWN.issuperset(types):
            args, kwargs = tree_map_only(DeferredLogits, _plain, (args, kwargs))
            return func(*args, **kwargs)
        if func in _OF_GRADIENTS:
            _check_gradients(args, kwargs)
        result = torch._C._disabled_torch_function_impl(func, types, args, kwargs)
        if func in _STEPS and type(result) is cls and args and torch.is_grad_enabled():
            _mark(result, args[0])
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        like = _like(func, args, kwargs)
        if like is not None:
            source, tensor = args[0].deferred, None if func is _DETACH else args[0]
            return cls.of(Deferred(source.head, like, source, tensor, func, args[1:], kwargs))
        tensors = {
            id(tensor): tensor for tensor in tree_leaves((args, kwargs)) if type(tensor) is cls
        }
        may_write = any(argument.alias_info is not None for argument in func._schema.arguments)
        for tensor in tensors.values():
            head = tensor.deferred.head
            _read[head.parameter] = head.is_read = True
            if may_write:
                head.settle()
        values = {key: tensor.deferred.compute() for key, tensor in tensors.items()}
        args, kwargs = tree_map_only(cls, lambda tensor: values[id(tensor)], (args, kwargs))
        result = func(*args, **kwargs)
        for key, value in values.items():
            if result is value:  # an operator in place
                return _written(tensors[key], value)
        return result


def _written(logits: DeferredLogits, values: torch.Tensor) -> DeferredLogits:
    """The logits after an operator in place.

    Raises:
        GemmsmithError: the operator has changed their size, which torch cannot follow here.
    """
    like = logits.deferred.like
    if (values.shape, values.stride()) != (like.shape, like.stride()):
        raise GemmsmithError(
            "deferred logits cannot change their size in place: use the operator that returns a "
            "new tensor, or set GEMMSMITH_DEFER_LOGITS=0"
        )
    return logits


def _plain(logits: DeferredLogits) -> torch.Tensor:
    """The values as a plain tensor in the same graph."""
    with torch._C.DisableTorchFunctionSubclass():
        plain: torch.Tensor = _aten.alias(logits)
        return plain


_DETACH = _aten.detach.default
_VIEWS = {_aten.view.default, _aten._unsafe_view.default, _aten.slice.Tensor, _DETACH}
_COPIES = {_aten.clone.default, _aten._to_copy.default, _aten.tanh.default}


def _like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The result's sizes, strides and type. Returns None if the operator is no step."""
    if not args or type(args[0]) is not DeferredLogits:
        return None
    like, head = args[0].deferred.like, args[0].deferred.head
    if head.is_shared:
        return None
    if func in _VIEWS:
        view: torch.Tensor = func(like, *args[1:])
        return view
    if func in SCALES:
        is_number = len(args) == 2 and type(args[1]) in (int, float) and not kwargs
        return torch.empty_like(like) if is_number else None
    if func not in _COPIES or not kwargs.keys() <= {"dtype", "device", "memory_format"}:
        return None
    dtype, device = kwargs.get("dtype") or like.dtype, kwargs.get("device")
    if device not in (None, head.x.device) or not dtype.is_floating_point:
        return None
    memory_format = kwargs.get("memory_format") or torch.preserve_format
    return torch.empty_like(like, dtype=dtype, memory_format=memory_format)


_Tensor = torch.Tensor
_BY_ADDRESS = {
    *(getattr(_Tensor, name, None) for name in (  # some are newer than others
        "__array__", "__deepcopy__", "__dlpack__", "__format__", "__reduce_ex__", "__repr__",
        "_typed_storage", "const_data_ptr", "data_ptr", "is_pinned", "is_shared", "numpy",
        "share_memory_", "storage", "storage_type", "tolist", "untyped_storage",
    )),
    _Tensor.__cuda_array_interface__.__get__,
}  # fmt: skip
"""Functions of torch that read memory without an operator."""

_KNOWN = {torch.Tensor, torch.nn.Parameter, DeferredLogits}
_OF_GRADIENTS = {_Tensor.retain_grad, _Tensor.register_hook, torch.autograd.grad}

_STEPS = {
    *(getattr(_Tensor, name) for name in (
        "__getitem__", "__mul__", "__rmul__", "__truediv__", "contiguous", "div", "flatten",
        "float", "mul", "narrow", "reshape", "tanh", "to", "type", "view", "view_as",
    )),
    torch.tanh, torch.mul, torch.div, torch.flatten, torch.reshape, torch.narrow,
}  # fmt: skip
"""Functions of torch that a loss may follow."""


def _check_gradients(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises GemmsmithError if logits would get no gradient, because their loss bypasses them."""
    for tensor in tree_leaves((args, kwargs)):
        if type(tensor) is DeferredLogits and tensor.deferred.head.has_loss:
            raise GemmsmithError(
                "the loss was computed without its logits, so they have no gradient: call "
                "retain_grad or register_hook before the loss, or set GEMMSMITH_DEFER_LOGITS=0"
            )


def _mark(result: DeferredLogits, source: object) -> None:
    """Note that autograd recorded the steps from `source` to `result`."""
    step: DeferredLogits | None = result
    while step is not None and step is not source:
        step.deferred.is_recorded = True
        step = step.deferred.tensor


class DeferredLinear(functions.Linear):
    """A linear layer whose forward pass computes no values."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> torch.Tensor:
        x, weight, _bias, main_grad, head = arguments
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        ctx.main_grad = main_grad
        size = (*x.shape[:-1], weight.shape[0])
        return DeferredLogits.of(Deferred(head, torch.empty(size, dtype=x.dtype, device="meta")))


def defer(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, parameter: torch.Tensor
) -> torch.Tensor:
    """`linear(x, weight, bias)` without its values. `parameter`: as of `HeadCall`."""
    head = HeadCall(x, weight, bias, parameter)
    logits: torch.Tensor = DeferredLinear.apply(x, weight, bias, None, head)  # type: ignore[no-untyped-call]
    if logits.grad_fn is not None:
        head.node = weakref.ref(logits.grad_fn)
    return logits
