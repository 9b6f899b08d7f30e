"""Functions that are Triton kernels on a GPU, and torch's own operators everywhere else."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from types import ModuleType
from typing import ParamSpec, TypeVar

import torch
from torch.autograd import forward_ad

from gemmsmith.errors import LaunchFailed
from gemmsmith.ops.engine.observers import is_dense, unobserved

P = ParamSpec("P")
R = TypeVar("R")

_transforms = torch._C._functorch.peek_interpreter_stack
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def by_triton(module: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function of torch's operators: on a GPU its namesake in `module` runs instead.

    Torch's operators run where the result is not final (`is_final`), and where no kernel can be
    launched: Triton is not installed, or cannot compile, or a CUDA graph is captured and the kernel
    is not compiled yet. Callers pass all arguments by position, a tensor first.
    """

    def decorate(by_torch: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(by_torch)
        def call(*arguments: P.args, **named: P.kwargs) -> R:
            if getattr(arguments[0], "is_cuda", False) and is_final(*arguments):
                kernels = _imported(module)
                if kernels is not None:
                    with suppress(LaunchFailed):
                        by_kernels: Callable[..., R] = getattr(kernels, by_torch.__name__)
                        return by_kernels(*arguments)
            return by_torch(*arguments, **named)

        return call

    return decorate


def is_final(*arguments: object) -> bool:
    """Whether the tensors are dense, and no graph, mode or transform observes operators on them."""
    if torch.compiler.is_compiling() or not unobserved() or is_derived(*arguments):
        return False
    return all(type(tensor) in _PLAIN and is_dense(tensor) for tensor in _tensors(arguments))


def is_derived(*arguments: object) -> bool:
    """Whether results of these have a gradient, a tangent, or take part in another transform."""
    if forward_ad._current_level >= 0 or _transforms() is not None:
        return True
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in _tensors(arguments))


def _tensors(arguments: Iterable[object]) -> Iterator[torch.Tensor]:
    """The tensors among these, and in tuples among these."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, tuple):
            yield from _tensors(argument)


@functools.cache
def _imported(name: str) -> ModuleType | None:
    """The module with the kernels. Returns None without Triton."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
