"""The forward of a patched module: an attribute of the module, so that its class stays its own.

`module.forward` is a `Forward` for as long as the patch is open. Types, parameters, hooks, buffers
and `state_dict` stay as they are, and `torch.compile` compiles anew, because it guards on the
presence of the attribute. The module's own forward runs whenever something differs from what was
recognized: the class has another one by now, the patch has ended, or the program is written down
for others (exported, traced).

The attribute never leaves the process: copies and pickles are made without it. It holds its module
weakly, as the module holds it.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._device import DeviceContext

from gemmsmith.ops.models.function_mode import Everywhere
from gemmsmith.ops.models.originals import CALL

Run = Callable[[Any, Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""A kind of layer: gets the recipe, the module, its own forward, and what it is called with."""


class _Switch:
    """Whether a module is patched; shared with its replicas."""

    is_on = False


class Forward:
    """What a patched module has for its forward."""

    def __init__(self, module: torch.nn.Module, switch: _Switch | None = None) -> None:
        self._module = weakref.ref(module)
        self._switch = _Switch() if switch is None else switch
        self._patches = 0
        self._run: Run
        self._recipe: object
        self._own: Any

    def _alive(self) -> Any:
        """The module.

        Raises:
            ReferenceError: the program kept the forward, but not the module.
        """
        module = self._module()
        if module is None:
            raise ReferenceError("the module of this forward no longer exists: keep the module")
        return module

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """As the module's own forward."""
        module = self._alive()
        own = type(module).forward
        if (
            not self._switch.is_on
            or own is not self._own
            or is_written_down()
            or not (torch.compiler.is_compiling() or _reaches_torch())
        ):
            return own(module, *arguments, **named)
        return self._run(self._recipe, module, own, arguments, named)

    @property
    def __wrapped__(self) -> Any:
        """The module's own, which has the signature."""
        module = self._alive()
        return MethodType(type(module).forward, module)

    def __getattr__(self, name: str) -> Any:
        """Name, code and defaults, as of a method; a function that takes `self` it has none."""
        if name in ("__func__", "__self__"):
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    def __reduce__(self) -> Any:
        """A copy that a class makes by itself has its own forward."""
        return getattr, (self._alive(), "forward")

    def install(self, run: Run, recipe: object) -> None:
        """Open one more patch of the module."""
        module = self._alive()
        self._run, self._recipe, self._own = run, recipe, type(module).forward
        self._patches += 1
        self._switch.is_on = True
        self._put(module)

    def remove(self) -> None:
        """Close one; the last gives the module its own forward back."""
        self._patches -= 1
        if self._patches:
            return
        self._switch.is_on = False
        module = self._module()
        if module is not None and module.__dict__.get("forward") is self:
            for name in _PUT:
                module.__dict__.pop(name, None)

    def _put(self, module: torch.nn.Module) -> None:
        module.__dict__.update(
            forward=self,
            __getstate__=self._state,
            _replicate_for_data_parallel=self._replica,
            __prepare_scriptable__=self._scriptable,
        )

    def _state(self) -> Any:
        """What copies and pickles are made of."""
        module = self._alive()
        state = type(module).__getstate__(module)  # type: ignore[call-arg]
        if not isinstance(state, dict):
            return state
        return {name: value for name, value in state.items() if name not in _PUT}

    def _replica(self) -> torch.nn.Module:
        """For another GPU, as `nn.DataParallel` makes one for each call."""
        module = self._alive()
        replica: torch.nn.Module = type(module)._replicate_for_data_parallel(module)
        forward = Forward(replica, self._switch)
        forward._run, forward._recipe, forward._own = self._run, self._recipe, self._own
        forward._put(replica)
        return replica

    def _scriptable(self) -> torch.nn.Module:
        """What `torch.jit.script` compiles, which puts other children in."""
        module = copy.copy(self._alive())
        module._modules = dict(module._modules)
        scriptable: torch.nn.Module = module
        return scriptable


_PUT = ("forward", "__getstate__", "_replicate_for_data_parallel", "__prepare_scriptable__")

_made: weakref.WeakKeyDictionary[torch.nn.Module, Forward] = weakref.WeakKeyDictionary()
"""Kept when a patch ends: a compiled graph is guarded by the very object."""
_lock = threading.RLock()


class Forwards:
    """The forwards that a patch put in."""

    def __init__(self) -> None:
        self._forwards: list[Forward] = []

    def put(self, module: torch.nn.Module, run: Run, recipe: object) -> None:
        """Patch a module; without effect if the program has given it a forward."""
        with _lock:
            if has_own_forward(module):
                return
            forward = _made.get(module)
            if forward is None:
                forward = _made[module] = Forward(module)
            forward.install(run, recipe)
            self._forwards.append(forward)

    def undo(self) -> None:
        """Close the patch of all of them."""
        with _lock:
            while self._forwards:
                self._forwards.pop().remove()


def has_own_forward(module: torch.nn.Module) -> bool:
    """Whether a program has put a forward into the module."""
    forward = module.__dict__.get("forward")
    return forward is not None and type(forward) is not Forward


def is_plain(module: torch.nn.Module) -> bool:
    """Whether calling it is calling its class's forward: it has no hooks and no other forward."""
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or has_own_forward(module)
        or type(module).__call__ is not CALL
    )


def is_unheard() -> bool:
    """Whether no hook listens to the calls of all modules; a compiler hears none."""
    return torch.compiler.is_compiling() or not _has_any_global_hook()  # type: ignore[no-untyped-call]


def is_patched(module: torch.nn.Module) -> bool:
    """Whether a patch of ours is in the module at present."""
    return type(module.__dict__.get("forward")) is Forward


def is_written_down() -> bool:
    """Whether the program is traced for others, who may have no gemmsmith: exported, or by jit."""
    # Not `is_exporting()`, which is always true in a graph that torch 2.11 compiles.
    exporting = getattr(torch.compiler, "_is_exporting_flag", False)
    return exporting or torch._C._get_tracing_state() is not None


def _reaches_torch() -> bool:
    """Whether no function mode of the program sees the calls that a layer makes."""
    count = torch._C._len_torch_function_stack()
    return not count or all(
        isinstance(torch._C._get_function_stack_at(at), DeviceContext | Everywhere)
        for at in range(count)
    )
