"""The forward of a patched module: an attribute of the module, so that its class is unchanged.

While the patch is open, `module.forward` is a `Forward`. Types, parameters, hooks, buffers and
`state_dict` are unchanged, and `torch.compile` compiles again, because it guards on the attribute.
The module's own forward runs if the class has got another forward since it was recognized, if the
patch has ended, or if the program is exported or traced.

A layer of which no winner computes any part is not patched, and costs nothing. Operands of fewer
rows than the layer's winners have go to the module's own forward at once. Where nothing else wins,
a layer costs the host a few microseconds: once it is decided that no kernel computes any part
of the layer for some operands, a single look-up leads to the module's own forward until winners or
decisions change.

The attribute never leaves the process: copies and pickles are made without it. The module refers to
the `Forward`, which has only a weak reference to the module.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable
from math import inf
from types import MethodType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._device import DeviceContext

from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.in_use import eager, on_install
from gemmsmith.ops.models.function_mode import Everywhere
from gemmsmith.ops.models.originals import CALL, Original
from gemmsmith.program.calls import on_start, recording

_recorders = recording()  # the list itself, which changes
_tracing = torch._C._get_tracing_state
_any_autocast = torch._C._is_any_autocast_enabled
_functions = torch._C._len_torch_function_stack
_needs = torch.is_grad_enabled


class DependsOn(NamedTuple):
    """What decides, beside the operands of a call, whether kernels compute a layer.

    Attributes:
        weights: each the name of a child, None for the module itself, and of its parameter.
        dropouts: names of children.
    """

    weights: tuple[tuple[str | None, str], ...] = ()
    dropouts: tuple[str, ...] = ()


NOTHING = DependsOn()
OWN_WEIGHT = DependsOn(weights=((None, "weight"),))


class Recipe(Protocol):
    """What a module computes. `relies_on`: what a program must not have replaced since."""

    @property
    def relies_on(self) -> tuple[Original, ...]: ...

    @property
    def depends_on(self) -> DependsOn: ...


Run = Callable[[Any, Any, tuple[Any, ...]], Any]
"""Runs a kind of layer. Called with the recipe, the module, and the arguments of the call. Returns
NotImplemented if the module's own forward must run: a layer's result may be None. Returns a `Left`
if that is decided for all such operands."""


Least = Callable[[Engine], float]
"""The number of elements of a layer's first operand below which an engine's winners compute no part
of the layer. Infinite if they never do."""


class Left(NamedTuple):
    """Says that no kernel computes any part of a layer, and the layer's result, if it is known."""

    value: Any = NotImplemented


LEFT = Left()

MOST_LEFT = 16_384
"""Kinds of calls that are known to be left to torch, some 300 bytes each. Beyond that all are
forgotten."""


class _Switch:
    """Whether a module is patched. A module shares it with its replicas."""

    is_on = False


class Forward:
    """The attribute `forward` of a patched module."""

    def __init__(self, module: torch.nn.Module, switch: _Switch | None = None) -> None:
        self._module = weakref.ref(module)
        self._switch = _Switch() if switch is None else switch
        self._patches = 0
        self._run: Run
        self._recipe: Recipe
        self._depends_on: DependsOn
        self._own: Any
        self._has_run = False  # a kernel, at the last call
        self._least: Least
        # With this engine and these winners, torch computes operands of fewer elements.
        self._small: tuple[Engine | None, object, float] = None, None, 0

    def _alive(self) -> Any:
        """The module; raises ReferenceError if the program has kept only the forward."""
        module = self._module()
        if module is None:
            raise ReferenceError("the module of this forward no longer exists: keep the module")
        return module

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        module = self._alive()
        own = type(module).forward
        if named or not self._switch.is_on:
            return own(module, *arguments, **named)
        is_eager, left, key = not is_dynamo_compiling(), None, None
        if is_eager:
            engine = eager()
            if engine is None:
                if not _recorders:
                    return own(module, *arguments)
            elif (
                self._small[2]
                and self._small[0] is engine
                and arguments
                and type(arguments[0]) is Tensor
                and not (_recorders or _functions() or _tracing())
                and arguments[0].numel() < self._small[2]
                and self._small[1] is engine.snapshot
            ):
                return own(module, *arguments)
            elif not self._has_run:
                left, key = engine.left, self._key(module, arguments)
                if key in left:
                    return own(module, *arguments)
                if self._small[0] is engine and self._small[1] is not engine.snapshot:
                    self.bound(engine, self._least)
        value = NotImplemented
        if own is self._own and is_unseen() and still(self._recipe.relies_on):
            value = self._run(self._recipe, module, arguments)
        is_left = type(value) is Left
        if is_eager:
            self._has_run = not is_left and value is not NotImplemented
        if is_left:
            value = value.value
            if left is not None and key is not None:
                if len(left) >= MOST_LEFT:
                    left.clear()
                left.add(key)
        return own(module, *arguments) if value is NotImplemented else value

    def _key(self, module: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """What decides which products the layer computes. Returns None if that is not known."""
        if _tracing() is not None or (_functions() and not is_unseen()):
            return None
        needs = _needs()
        key: list[Any] = [self._switch, needs, _any_autocast() and _autocast(arguments)]
        children = module._modules
        weights, dropouts = self._depends_on
        try:
            # Few calls into torch: in a model each takes longer than all that Python does here.
            for x in arguments:
                if type(x) is not Tensor:
                    return None
                key += (x.shape, x.stride(), x.dtype, x.get_device(), needs and x.requires_grad)
            for child, name in weights:
                parameters = (module if child is None else children[child])._parameters
                weight = parameters[name]
                key.append(weight.numel())
                if needs:
                    bias = parameters.get("bias")
                    key += (weight.requires_grad, bias is not None and bias.requires_grad)
            for name in dropouts:
                dropout = children[name]
                key.append(dropout.training and dropout.p)
        except (AttributeError, KeyError):  # the module is another now
            return None
        except RuntimeError:  # a nested tensor has no sizes
            return None
        return tuple(key)

    @property
    def __wrapped__(self) -> Any:
        # The module's own forward, which has the signature.
        module = self._alive()
        return MethodType(type(module).forward, module)

    def __getattr__(self, name: str) -> Any:
        # Has the attributes of a method (name, code, defaults), but is not a bound method.
        if name in ("__func__", "__self__"):
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    def __reduce__(self) -> Any:
        # A class may copy the module's attributes itself. The copy then has its own forward.
        return getattr, (self._alive(), "forward")

    def install(self, run: Run, recipe: Recipe) -> None:
        """Open a further patch of the module."""
        module = self._alive()
        self._run, self._recipe, self._own = run, recipe, type(module).forward
        self._depends_on = recipe.depends_on
        self._patches += 1
        self._switch.is_on = True
        self._put(module)

    def bound(self, engine: Engine | None, least: Least) -> None:
        """Note below which number of elements torch computes with this engine."""
        snapshot, below = (None, inf) if engine is None else (engine.snapshot, least(engine))
        self._least, self._small = least, (engine, snapshot, below)

    def remove(self) -> None:
        """Close a patch. The last one restores the module's own forward."""
        self._patches -= 1
        if self._patches:
            return
        self._switch.is_on, self._small = False, (None, None, 0)
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
        """The state for copies and pickles, without our attributes."""
        module = self._alive()
        state = type(module).__getstate__(module)  # type: ignore[call-arg]
        if not isinstance(state, dict):
            return state
        return {name: value for name, value in state.items() if name not in _PUT}

    def _replica(self) -> torch.nn.Module:
        """A replica for another GPU. `nn.DataParallel` makes replicas for each call."""
        module = self._alive()
        replica: torch.nn.Module = type(module)._replicate_for_data_parallel(module)
        forward = Forward(replica, self._switch)
        forward._run, forward._recipe, forward._own = self._run, self._recipe, self._own
        forward._depends_on, forward._least = self._depends_on, self._least
        forward._small = self._small
        forward._put(replica)
        return replica

    def _scriptable(self) -> torch.nn.Module:
        """A copy of the module for `torch.jit.script`, which replaces the children."""
        module = copy.copy(self._alive())
        module._modules = dict(module._modules)
        scriptable: torch.nn.Module = module
        return scriptable


_PUT = ("forward", "__getstate__", "_replicate_for_data_parallel", "__prepare_scriptable__")

_made: weakref.WeakKeyDictionary[torch.nn.Module, Forward] = weakref.WeakKeyDictionary()
"""The forwards of modules. They are kept when a patch ends, because compiled graphs have guards on
the identity of these objects."""
_lock = threading.RLock()


class Forwards:
    """The forwards that a patch has installed, and the layers that may need one later."""

    def __init__(self) -> None:
        self._forwards: dict[Forward, None] = {}
        self._layers: weakref.WeakKeyDictionary[torch.nn.Module, tuple[Run, Recipe, Least]] = (
            weakref.WeakKeyDictionary()
        )
        _all.add(self)

    def put(self, module: torch.nn.Module, run: Run, recipe: Recipe, least: Least) -> None:
        """Patch a module once, unless the program has given it a forward.

        A layer of which no winner computes any part is patched when other winners come into use, or
        when a recording begins. Until then its calls cost nothing.
        """
        with _lock:
            if has_own_forward(module):
                return
            self._layers[module] = run, recipe, least
            engine = eager()  # in a recomputation, that of the first computation
            forward = _made.get(module)
            if forward not in self._forwards:
                is_idle = engine is None or (not engine.refreshes and least(engine) == inf)
                if is_idle and not _recorders:
                    return
                if forward is None:
                    forward = _made[module] = Forward(module)
                forward.install(run, recipe)
                self._forwards[forward] = None
            forward.bound(engine, least)

    def reconsider(self) -> None:
        """Patch what other winners may compute, or what is recorded from now on."""
        with _lock:
            for module, layer in list(self._layers.items()):
                self.put(module, *layer)

    def undo(self) -> None:
        with _lock:
            self._layers.clear()
            while self._forwards:
                self._forwards.popitem()[0].remove()


_all: weakref.WeakSet[Forwards] = weakref.WeakSet()


def _reconsider() -> None:
    with _lock:
        for forwards in list(_all):
            forwards.reconsider()


on_install(_reconsider)
on_start(_reconsider)


def has_own_forward(module: torch.nn.Module) -> bool:
    """Whether a program has set the module's attribute `forward`."""
    return type(module.__dict__.get("forward")) not in _NOT_OWN


_NOT_OWN = (type(None), Forward)


def is_plain(module: torch.nn.Module) -> bool:
    """Whether a call only runs the forward of its class, without hooks or another forward."""
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or type(module).__call__ is not CALL
        # As `has_own_forward`, without a call for each child of each layer.
        or type(module.__dict__.get("forward")) not in _NOT_OWN
    )


def has_no_global_hooks() -> bool:
    """Whether there are no global hooks on modules' calls. Compilers ignore such hooks."""
    return torch.compiler.is_compiling() or not _has_any_global_hook()  # type: ignore[no-untyped-call]


def _autocast(arguments: tuple[Any, ...]) -> object:
    """The type to which autocast casts these operands; None if it does not."""
    is_wrong = not arguments or not isinstance(arguments[0], Tensor)
    kind = "cpu" if is_wrong else arguments[0].device.type
    is_on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if is_on else None


def still(relies_on: tuple[Original, ...]) -> bool:
    """Whether no attribute has been replaced since."""
    for owner, name, value in relies_on:  # noqa: SIM110 - runs at every call of a layer
        if getattr(owner, name, None) is not value:
            return False
    return True


def is_unseen() -> bool:
    """Whether nothing of the program would see that a layer makes other calls than its own.

    An exporter and a tracer of jit would: what they write runs without gemmsmith. A torch function
    mode sees the calls, except in a graph that is being compiled.
    """
    # `is_exporting()` is always true in a graph that torch 2.11 compiles.
    if getattr(torch.compiler, "_is_exporting_flag", False):
        return False
    if torch._C._get_tracing_state() is not None:
        return False
    count = 0 if torch.compiler.is_compiling() else torch._C._len_torch_function_stack()
    return not count or all(
        isinstance(torch._C._get_function_stack_at(at), DeviceContext | Everywhere)
        for at in range(count)
    )
