"""`torch.optim.Muon` of an unmodified program: the updates of equal shape are computed at once.

For each group of parameters torch calls a function that loops over them. While a patch is open,
another function with the same results, up to rounding, stands for it in torch's module: momentum,
weight decay and learning rates are computed as by torch, and state and options stay torch's. It
replaces a function of known source alone.

At a call, torch's own function runs in compiled graphs, without winners in use for the device, for
tensors of other libraries, under autocast, where rows must have the same bits at every M, if modes
or transforms must see torch's calls, and if the program has replaced a function that torch's calls.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import _muon

from gemmsmith.ops.engine.in_use import current
from gemmsmith.ops.engine.observers import is_traced
from gemmsmith.ops.models.forwards import is_unseen, still
from gemmsmith.ops.models.norms import kind_in_use
from gemmsmith.ops.models.originals import Original, originals
from gemmsmith.ops.models.reading import parsed
from gemmsmith.ops.products.newton_schulz import batches, newton_schulz
from gemmsmith.ops.products.registry import ours

_LOOP, _ITERATION = "_single_tensor_muon", "_zeropower_via_newtonschulz"
_SOURCES = {
    _LOOP: "01006f1117b0c81eddccc823ede19cb80f3cb2eacb6f1b9a9bff3a325c09a884",
    _ITERATION: "ec244827c5bccd53b49f46d11d8230b2cd2261c7f16a718aee7a5886192edc8b",
}
"""SHA-256 of the parameters and statements of the functions in torch 2.11 and 2.13."""

Tensors = list[torch.Tensor]
Loop = Callable[..., None]


class _Open:
    """Whether a patch is open: a program may have kept our function."""

    is_on = False


@contextmanager
def muon_in_batches() -> Iterator[None]:
    """Compute Muon's updates of equal shape at once, until the end of the block.

    Blocks are nested. All optimizers of the process take part, existing and new ones.
    """
    own = getattr(_muon, _LOOP, None)
    relies_on = None if _Open.is_on else _recognized()
    if relies_on is None:
        yield
        return
    loop = _in_batches(own, relies_on)
    setattr(_muon, _LOOP, loop)
    _Open.is_on = True
    try:
        yield
    finally:
        _Open.is_on = False
        if getattr(_muon, _LOOP) is loop:  # else the program has replaced it since
            setattr(_muon, _LOOP, own)


def _recognized() -> tuple[Original, ...] | None:
    """What the known loop relies on. Returns None if torch has another loop here."""
    if any(_hash(getattr(_muon, name, None)) != known for name, known in _SOURCES.items()):
        return None
    if originals((_muon, _LOOP)) is None:
        return None
    return originals((_muon, _ITERATION), (_muon, "_adjust_lr"), (torch, "addmm"))


def _hash(function: object) -> str | None:
    """Of a function's parameters and statements. Returns None if its source is not known."""
    tree = parsed(function)
    if tree is None or tree.decorator_list:
        return None
    body = tree.body if ast.get_docstring(tree, clean=False) is None else tree.body[1:]
    text = "\n".join(map(ast.unparse, (tree.args, *body)))
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache  # because compiled graphs have guards on the function
def _in_batches(own: Loop, relies_on: tuple[Original, ...]) -> Loop:
    @functools.wraps(own)
    def loop(params: Tensors, grads: Tensors, muon_momentum_bufs: Tensors, **options: Any) -> None:
        by_parameter = params, grads, muon_momentum_bufs
        if torch.compiler.is_compiling() or not (
            _Open.is_on and still(relies_on) and _suit(*by_parameter, options)
        ):
            own(*by_parameter, **options)
            return
        for positions in batches(grads):
            _step(*([tensors[at] for at in positions] for tensors in by_parameter), **options)

    return loop


def suits(*matrices: torch.Tensor) -> bool:
    """Whether kernels may compute with these matrices, unseen by the program."""
    engine, kind = current(), kind_in_use()
    if engine is None or engine.is_invariant or kind is None:
        return False
    if torch.is_grad_enabled() or torch.is_autocast_enabled(kind) or not is_unseen():
        return False
    return (
        ours(*matrices)
        and not is_traced(matrices[0])
        and all(
            matrix.device.type == kind
            and matrix.dtype in _FLOATS
            and matrix.dim() == 2
            and matrix.numel() > 0
            for matrix in matrices
        )
    )


def _suit(params: Tensors, grads: Tensors, moments: Tensors, options: dict[str, Any]) -> bool:
    """Whether updates in batches are those of torch's loop."""
    if len(params) < 2 or isinstance(options["lr"], torch.Tensor) or options["has_complex"]:
        return False
    if not suits(*params, *grads, *moments):
        return False
    if len({param.data_ptr() for param in params}) < len(params):
        return False  # two of them share memory: their order matters
    # Without Nesterov's momentum, torch divides a moment in bf16 itself by its norm.
    floats = _FLOATS if options["nesterov"] else _FLOATS - {torch.bfloat16}
    return all(
        param.shape == grad.shape == moment.shape
        and param.device == grad.device == moment.device
        and grad.dtype is moment.dtype
        and grad.dtype in floats
        for param, grad, moment in zip(params, grads, moments, strict=True)
    )


_FLOATS = {torch.bfloat16, torch.float16, torch.float32, torch.float64}


def _step(params: Tensors, grads: Tensors, moments: Tensors, **options: Any) -> None:
    """One step of torch's loop for matrices of one shape, some of them transposed."""
    lr, momentum = options["lr"], options["momentum"]
    torch._foreach_lerp_(moments, grads, 1 - momentum)
    updates: Any = moments
    if options["nesterov"]:
        updates = torch._foreach_lerp(grads, moments, momentum)
    updates = newton_schulz(
        updates, options["ns_steps"], options["ns_coefficients"], options["eps"]
    )
    torch._foreach_mul_(params, 1 - lr * options["weight_decay"])
    for param, update in zip(params, updates, strict=True):
        adjusted = _muon._adjust_lr(lr, options["adjust_lr_fn"], param.shape)
        param.add_(update, alpha=-adjusted)
