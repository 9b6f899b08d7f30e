"""Other classes for a model's modules, for a while: how a patch replaces forwards.

A module's class becomes one derived from its own, whose forward comes first. So parameters, hooks,
buffers and `state_dict` stay as they are, `isinstance` holds, `torch.compile` guards on it, and the
own forward is one `super()` away. Copies and pickles of a patched model are of the model's own
classes: what a patch put in never leaves the process.

A class that was derived from ours while the patch was open, as FSDP2's `fully_shard` does, cannot
be taken out from under it; such a module is told to run its own forward from then on.
"""

from __future__ import annotations

import copy
import copyreg
import weakref
from collections.abc import Iterable
from typing import Any, ClassVar

import torch

from gemmsmith.ops.products import operators


class Swapped(torch.nn.Module):
    """The first base of every class that a patched module has for the while.

    Attributes:
        own_class: what the module is without the patch.
        recipe: what the forward needs to know of it.
        is_swapped: False on a module whose patch has ended, but whose class could not be restored.
    """

    own_class: ClassVar[type[torch.nn.Module]]
    recipe: ClassVar[Any] = None
    is_swapped: bool = True

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A module of its own class: slices of a `Sequential`, say, are not patched."""
        own = cls.__dict__.get("own_class")
        return super().__new__(cls) if own is None else own(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As the module's own class is pickled and copied."""
        made = super().__reduce_ex__(protocol)
        own = type(self).__dict__.get("own_class")
        if own is None or not isinstance(made, tuple) or type(self) not in made[1]:
            return made
        # Not `__newobj__`, which makes nothing of another class than the object's.
        rebuild = copyreg._reconstructor  # type: ignore[attr-defined]
        return (rebuild, (own, object, None), *made[2:])

    def __prepare_scriptable__(self) -> torch.nn.Module:
        """What `torch.jit.script` compiles: a module of its own class, with the same parts."""
        return copy.copy(self)


class TunedLinear(Swapped, torch.nn.Linear):
    """What a patched model's `nn.Linear` is."""

    own_class = torch.nn.Linear

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's own name
        """As `nn.Linear`."""
        if not self.is_swapped:
            return super().forward(input)
        return operators.linear(input, self.weight, self.bias)


_classes: dict[tuple[Any, ...], type[torch.nn.Module]] = {}


def class_for(
    own: type[torch.nn.Module], ours: type[Swapped], recipe: object
) -> type[torch.nn.Module]:
    """The class of a patched module of class `own`, with the forward of `ours`; always the same.

    A compiled model is guarded by its modules' classes: another one would compile it anew.
    """
    made = _classes.get((own, ours, recipe))
    if made is not None:
        return made
    names = {
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        "own_class": own,
        "recipe": recipe,
    }
    made = type(own.__name__, (ours, own), names)
    return _classes.setdefault((own, ours, recipe), made)


Swap = tuple[torch.nn.Module, type[torch.nn.Module]]
"""A module, and the class it gets."""


class Swaps:
    """Modules that have other classes at present. Holds none of them alive."""

    def __init__(self) -> None:
        self._modules: list[tuple[weakref.ref[torch.nn.Module], type[torch.nn.Module]]] = []

    def make(self, swaps: Iterable[Swap]) -> None:
        """Give the modules their classes."""
        for module, other in swaps:
            module.__class__ = other
            self._modules.append((weakref.ref(module), other))

    def resume(self, module: Swapped) -> None:
        """Let one that was told to run its own forward run ours again."""
        module.__dict__.pop("is_swapped", None)
        self._modules.append((weakref.ref(module), Swapped))

    def undo(self) -> None:
        """Give the modules their own classes back."""
        while self._modules:
            reference, other = self._modules.pop()
            module = reference()
            if module is None:
                continue
            if type(module) is other:
                module.__class__ = other.__dict__["own_class"]
            elif isinstance(module, other):  # wrapped since
                module.__dict__["is_swapped"] = False
