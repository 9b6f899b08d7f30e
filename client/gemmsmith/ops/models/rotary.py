"""Rotary position embeddings of a patched model: one kernel replaces six to ten operators.

Models call a function of their module, such as `apply_rotary_pos_emb`, with Q, K, cosines and
sines. It is recognized by its source (`gemmsmith.ops.models.rotary_forms`).

While a patch is open, a `StandIn` is the attribute of the module. It runs the kernel
(`gemmsmith.ops.products.rotary`) while winners are in use, and otherwise the function. The function
also runs in graphs that are compiled, exported or traced, if a mode or a transform observes the
operators, if cosines or sines need a gradient, and if it has no form for such operands.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from gemmsmith.ops.engine.recomputing import Again, remember
from gemmsmith.ops.models.forwards import is_unseen, still
from gemmsmith.ops.models.norms import kind_in_use
from gemmsmith.ops.models.rotary_forms import (
    MISSING,
    RotaryRecipe,
    function_of,
    rotary_recipe,
)
from gemmsmith.ops.products.registry import CallWay, wants_gradient, way_of
from gemmsmith.ops.products.rotary import CONTIGUOUS, Rotation, Strides, dense_strides, rotary

_TYPES = (torch.bfloat16, torch.float16, torch.float32)


class StandIn:
    """A function that runs instead of a recognized one, as an attribute of modules.

    It is the function itself as soon as no patch is open. Functions are kept, because compiled
    graphs have guards on their identity.
    """

    def __init__(self, own: Any, function: FunctionType, recipe: RotaryRecipe) -> None:
        self._own, self._function, self._recipe = own, function, recipe
        self._patches: dict[tuple[str, str], int] = {}
        run, is_compiling = self._run, is_dynamo_compiling

        def stand_in(*arguments: Any, **named: Any) -> Any:
            if is_compiling():
                return own(*arguments, **named)
            result = run(arguments, named)
            return own(*arguments, **named) if result is NotImplemented else result

        # It has the function's globals, in which torch's script compiler reads its source.
        made = FunctionType(
            stand_in.__code__, function.__globals__, function.__name__, None, stand_in.__closure__
        )
        self.function = functools.update_wrapper(made, function)
        _own[self.function] = own

    def put(self, module: ModuleType, name: str) -> None:
        place = module.__name__, name
        self._patches[place] = self._patches.get(place, 0) + 1
        _open.add(self)
        if getattr(module, name) is self._own:
            setattr(module, name, self.function)

    def remove(self, module: ModuleType, name: str) -> None:
        place = module.__name__, name
        self._patches[place] -= 1
        if not self._patches[place]:
            del self._patches[place]
            if not self._patches:
                _open.discard(self)
            if getattr(module, name, None) is self.function:
                setattr(module, name, self._own)

    def _run(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        at_first = _recomputed.at_first
        is_on = self._patches if at_first is None else self in at_first
        kind = kind_in_use() if is_on else None
        if kind is None or not is_unseen() or not still(self._recipe.relies_on):
            return NotImplemented
        if self._own is not self._function and function_of(self._own) is not self._function:
            return NotImplemented
        values = self._values(arguments, named)
        return NotImplemented if values is None else run_rotary(self._recipe, kind, values)

    def _values(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any] | None:
        """The call's values by the form's parameters. Returns None if the call is wrong."""
        recipe, count = self._recipe, len(arguments)
        if count > len(recipe.defaults):
            return None
        values = [*arguments, *recipe.defaults[count:]]
        for name, value in named.items():
            at = recipe.names.get(name, -1)
            if at < count:
                return None
            values[at] = value
        if any(value is MISSING for value in values):
            return None
        return {role: values[at] for role, at in recipe.at.items()}


def run_rotary(recipe: RotaryRecipe, kind: str, values: dict[str, Any]) -> Any:
    """The function's result by the kernel. Returns NotImplemented if the function must run."""
    q: Any = values["x"] if "x" in values else values["q"]
    k, cos, sin = values.get("k"), values["cos"], values["sin"]
    axis = values.get("dim", recipe.form.axis)
    operands = (q, cos, sin) if "x" in values else (q, k, cos, sin)
    for operand in operands:
        if not isinstance(operand, torch.Tensor) or operand.get_device() != q.get_device():
            return NotImplemented
    if q.device.type != kind or way_of(*operands) is not CallWay.EAGER or wants_gradient(cos, sin):
        return NotImplemented
    if type(axis) is not int:
        return NotImplemented
    of_k = None if k is None else _described(k)
    plan = _plan(recipe, axis, _described(q), of_k, _described(cos), _described(sin))
    if plan is None:
        return NotImplemented
    if plan.copies_factors:
        cos, sin = cos.contiguous(), sin.contiguous()
    factors = cos.unsqueeze(plan.axis), sin.unsqueeze(plan.axis)
    result = rotary(q, k, *factors, plan.rotation, plan.dtype, plan.order)
    return result[0] if "x" in values else result


class _Description(NamedTuple):
    """What decides, of a tensor, how the kernel reads it."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def is_read(self) -> bool:
        """Whether the kernel reads it as Q or K."""
        return len(self.shape) in (3, 4) and self.strides[-1] == 1 and 0 not in self.strides


def _described(x: torch.Tensor) -> _Description:
    return _Description(x.shape, x.stride(), x.dtype)


class _Plan(NamedTuple):
    """How a call runs: the arguments of `rotary`, and how its factors are made.

    Attributes:
        axis: the dimension that is inserted into the factors.
        copies_factors: whether they are copied, because their last dimension has gaps as gpt-oss's.
    """

    rotation: Rotation
    dtype: torch.dtype
    order: tuple[Strides | None, Strides | None]
    axis: int
    copies_factors: bool


@functools.lru_cache(maxsize=4096)
def _plan(
    recipe: RotaryRecipe,
    axis: int,
    q: _Description,
    k: _Description | None,
    cos: _Description,
    sin: _Description,
) -> _Plan | None:
    """Returns None if the kernel has no form for such a call."""
    form, reads_pairs = recipe.form, recipe.pairing.reads_pairs
    heads = [q] if k is None else [q, k]
    if (sin.dtype, sin.shape) != (cos.dtype, cos.shape):
        return None
    axis += len(cos.shape) + 1 if axis < 0 else 0
    if not 0 <= axis < len(cos.shape):
        return None
    inserted = (*cos.shape[:axis], 1, *cos.shape[axis:])
    width, size = cos.shape[-1], q.shape[-1] if q.shape else 0
    half = width if form.is_halved else width // 2
    for x in heads:
        if x.dtype is not q.dtype or not x.is_read or not x.shape.numel() or x.shape[-1] != size:
            return None
        if len(inserted) != len(x.shape) or not all(
            own in (1, other) for own, other in zip(inserted[:-1], x.shape[:-1], strict=True)
        ):
            return None
    is_sized = size >= 2 * half if form.is_partial else size == 2 * half
    if not is_sized or not half or (width % 2 and not form.is_halved):
        return None
    if q.dtype not in _TYPES or cos.dtype not in (q.dtype, torch.float32):
        return None
    results = [dense_strides(x.shape, CONTIGUOUS if form.is_joined else x.strides) for x in heads]
    return _Plan(
        rotation=Rotation(
            half=half,
            reads_pairs=reads_pairs,
            writes_pairs=recipe.pairing.writes_pairs,
            shares=form.shares,
            has_pairs=reads_pairs,
            sign=recipe.pairing.sign,
        ),
        dtype=q.dtype if form.casts else torch.promote_types(q.dtype, cos.dtype),
        order=(results[0], None if k is None else results[1]),
        axis=axis,
        copies_factors=cos.strides[-1] != 1 or sin.strides != cos.strides,
    )


class _StandInsAtFirst(threading.local):
    """The stand-ins that ran at first what this thread recomputes. None outside of that."""

    at_first: frozenset[StandIn] | None = None


_recomputed = _StandInsAtFirst()
_open: set[StandIn] = set()
_lock = threading.RLock()
_own: dict[object, Any] = {}
"""The functions for which stand-ins run, by these."""


_made: dict[object, StandIn] = {}
"""The stand-ins, by what they replace. They stay, as the functions of a library do."""


def _stand_in_of(own: Any) -> StandIn | None:
    """Returns None if an attribute's value is not recognized."""
    function = function_of(own)
    recipe = None if function is None else rotary_recipe(function)
    if function is None or recipe is None:
        return None
    if own not in _made:
        _made[own] = StandIn(own, function, recipe)
    return _made[own]


class Functions:
    """The functions of Python modules that a patch has replaced."""

    def __init__(self) -> None:
        self._read: set[str] = set()
        self._put: dict[tuple[str, str], tuple[StandIn, ModuleType]] = {}

    def take_over(self, layers: Iterable[nn.Module]) -> list[str]:
        """Replace what the classes of these may call. Returns a description of all so far."""
        with _lock:
            classes = {kind for layer in layers for kind in type(layer).__mro__}
            owners = {kind.__module__ for kind in classes} - self._read
            self._read |= owners
            for owner in owners:
                if owner.partition(".")[0] != "torch" and owner in sys.modules:
                    self._replace(sys.modules[owner])
            return [f"{name} of {owner} (rotary embedding)" for owner, name in self._put]

    def _replace(self, module: ModuleType) -> None:
        for name, value in list(vars(module).items()):
            stand_in = _stand_in_of(
                _own.get(value, value) if type(value) is FunctionType else value
            )
            if stand_in is not None:
                stand_in.put(module, name)
                self._put[module.__name__, name] = stand_in, module

    def undo(self) -> None:
        with _lock:
            self._read.clear()
            while self._put:
                (_, name), (stand_in, module) = self._put.popitem()
                stand_in.remove(module, name)


def _as_open_now() -> Again:
    # Patches may have been opened since, of other models with the same functions.
    return functools.partial(_as_at_first, frozenset(_open))


@contextmanager
def _as_at_first(stand_ins: frozenset[StandIn]) -> Iterator[None]:
    before, _recomputed.at_first = _recomputed.at_first, stand_ins
    try:
        yield
    finally:
        _recomputed.at_first = before


remember(_as_open_now)
