"""What follows the operators of a program beside autograd and autocast, and what a tensor holds."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from gemmsmith.program.calls import recording

_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_keys = torch._C._dispatch_keys
_Key, _Keys = torch._C.DispatchKey, torch._C.DispatchKeySet


def _keys_of(*keys: torch._C.DispatchKey) -> int:
    """The set as `DispatchKeySet.raw_repr` gives it."""
    keyset = _Keys(keys[0])
    for key in keys[1:]:
        keyset = keyset | _Keys(key)
    return keyset.raw_repr()


_DENSE = {
    _keys_of(device, autocast, *autograd)
    for device, autocast, own in (
        (_Key.CPU, _Key.AutocastCPU, _Key.AutogradCPU),
        (_Key.CUDA, _Key.AutocastCUDA, _Key.AutogradCUDA),
    )
    for autograd in ((), (_Key.ADInplaceOrView, own))  # without: made in inference mode
}
"""What dispatches for a dense tensor: its memory holds its values. A lazily negated tensor has one
key more, and so have nested, sparse, quantized and wrapped ones, and one of zeros that takes no
memory; a tensor on `meta` has other keys."""


def unobserved() -> bool:
    """Whether nothing but autograd and autocast looks at what operators do."""
    return not _modes() and _transforms() is None and not recording()


_KNOWN_MODES = ("torch._functorch", "torch._subclasses", "torch.fx.experimental", "gemmsmith.")
"""Where dispatch modes are defined that know our operators: those by which torch traces and runs
compiled graphs, and our own that captures products without data."""


def is_watched() -> bool:
    """Whether a transform of `torch.func` or a dispatch mode of the program must see torch's own
    operators: one that counts FLOPs, say, or that decides what a checkpoint saves.
    """
    if _transforms() is not None:
        return True
    return bool(_modes()) and not all(
        type(mode).__module__.startswith(_KNOWN_MODES)
        for mode in _get_current_dispatch_mode_stack()
    )


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether a graph is being made of what is done to it: it holds no data."""
    return isinstance(tensor, (FakeTensor, FunctionalTensor))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor holds its values, on a device that kernels are for."""
    return _keys(tensor).raw_repr() in _DENSE


def dense(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient, in memory if torch holds it lazily: negated, or as zeros."""
    if is_dense(gradient) or not (gradient.is_neg() or gradient._is_zerotensor()):
        return gradient
    return gradient.clone()


def only_torch_differentiates(gradient: torch.Tensor) -> bool:
    """Whether torch's own operators must compute a backward pass.

    They do so if a graph or a tangent of the backward pass itself is asked for, and for a gradient
    that is no plain tensor, such as a batch of gradients.
    """
    if torch.is_grad_enabled() or forward_ad._current_level >= 0:
        return True
    return not (is_dense(gradient) or is_traced(gradient))
