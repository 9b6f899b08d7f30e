"""Functions as their library wrote them: a program or another library may have replaced some.

Whether `F.gelu` is torch's own cannot be seen by comparing it with itself. A builtin of torch keeps
its name, and a function in Python knows the file and the definition that its code comes from.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType
from typing import Any, NamedTuple

import torch


class Original(NamedTuple):
    """An attribute that must stay what it is.

    Attributes:
        owner: a module or a class.
        name: of the attribute.
        value: what it was when a layer was recognized by it.
    """

    owner: Any
    name: str
    value: object


def original(owner: Any, name: str) -> Original | None:
    """Returns None if `owner.name` is not what the library that defines `owner` put there.

    Args:
        owner: a module, or a class, whose attribute may be inherited.
        name: of a function or method.
    """
    value = getattr(owner, name, None)
    if isinstance(value, BuiltinFunctionType | MethodDescriptorType):
        return Original(owner, name, value) if value.__name__ == name else None
    if not isinstance(value, FunctionType):
        return None
    written, where = name, owner
    if isinstance(owner, type):
        where = next(base for base in owner.__mro__ if name in vars(base))
        written = f"{where.__qualname__}.{name}"
        where = sys.modules.get(where.__module__)
    code = value.__code__
    is_own = code.co_qualname == written and code.co_filename == getattr(where, "__file__", None)
    return Original(owner, name, value) if is_own else None


def originals(*attributes: tuple[Any, str]) -> tuple[Original, ...] | None:
    """Returns None if one of the attributes is not the original."""
    all_of_them = [original(owner, name) for owner, name in attributes]
    known = tuple(one for one in all_of_them if one is not None)
    return known if len(known) == len(attributes) else None


def still(relied_on: Iterable[Original]) -> bool:
    """Whether nothing was replaced since."""
    for owner, name, value in relied_on:  # noqa: SIM110 - at every call of a layer
        if getattr(owner, name, None) is not value:
            return False
    return True


CALL = torch.nn.Module._wrapped_call_impl
"""What `module(x)` runs, unless its class or a program has another way."""
