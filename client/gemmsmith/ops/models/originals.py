"""Checks whether functions are a library's originals, or a program has replaced them.

There is no second copy of `F.gelu` to compare it with. Instead, a builtin function must have its
own name, and a Python function must come from its library's file and definition.
"""

from __future__ import annotations

import sys
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType
from typing import Any, NamedTuple

import torch


class Original(NamedTuple):
    """An attribute that must not change.

    Attributes:
        owner: a module or a class.
        name: the attribute's name.
        value: its value when a layer was recognized.
    """

    owner: Any
    name: str
    value: object


def original(owner: Any, name: str) -> Original | None:
    """The attribute `owner.name`. Returns None if it is not the one of `owner`'s library.

    Args:
        owner: a module or a class. A class may inherit the attribute.
        name: name of a function or method.
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
    """The attributes. Returns None if any of them is not an original."""
    candidates = [original(owner, name) for owner, name in attributes]
    known = tuple(candidate for candidate in candidates if candidate is not None)
    return known if len(known) == len(attributes) else None


CALL = torch.nn.Module._wrapped_call_impl
"""The function that `module(x)` runs, unless the class or the program has replaced it."""
