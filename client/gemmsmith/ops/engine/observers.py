"""What observes a program's operators beside autograd and autocast, and what a tensor holds."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from gemmsmith.program.calls import recording

_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack
keys_of = torch._C._dispatch_keys
_Key, _Keys = torch._C.DispatchKey, torch._C.DispatchKeySet


def _set_of(*keys: torch._C.DispatchKey) -> int:
    """The number by which `DispatchKeySet.raw_repr` names the set."""
    keyset = _Keys(keys[0])
    for key in keys[1:]:
        keyset = keyset | _Keys(key)
    return keyset.raw_repr()


DENSE = {
    _set_of(device, autocast, *autograd)
    for device, autocast, own in (
        (_Key.CPU, _Key.AutocastCPU, _Key.AutogradCPU),
        (_Key.CUDA, _Key.AutocastCUDA, _Key.AutogradCUDA),
    )
    for autograd in ((), (_Key.ADInplaceOrView, own))  # without: made in inference mode
}
"""The dispatch keys of dense tensors, whose memory holds their values. Lazily negated, nested,
sparse, quantized and wrapped tensors, and zeros without memory, have one key more; a tensor on
`meta` has others."""


_recorders = recording()  # the list itself, which changes


def unobserved() -> bool:
    """Whether nothing but autograd and autocast observes operators."""
    return not _modes() and _transforms() is None and not _recorders


_KNOWN_MODES = ("torch._functorch", "torch._subclasses", "torch.fx.experimental", "gemmsmith.")
"""Modules whose dispatch modes know our operators: by these torch traces and runs compiled graphs,
and ours captures products without data."""


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
    """Whether it holds no data, because operators on it go into a graph."""
    return isinstance(tensor, (FakeTensor, FunctionalTensor))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor holds its values, on a device that kernels are for."""
    return keys_of(tensor).raw_repr() in DENSE


def dense(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient in memory. torch may hold it lazily: negated, or as zeros without memory."""
    if is_dense(gradient) or not (gradient.is_neg() or gradient._is_zerotensor()):
        return gradient
    return gradient.clone()


def only_torch_differentiates(gradient: torch.Tensor) -> bool:
    """Whether torch's own operators must compute a backward pass.

    They must if the backward pass itself gets a graph or a tangent, or if the gradient is no plain
    tensor, such as a batch of gradients.
    """
    if torch.is_grad_enabled() or forward_ad._current_level >= 0:
        return True
    return not (is_dense(gradient) or is_traced(gradient))
