"""The torch modules that a process builds, remembered so that they can be patched later.

A program that runs with `GEMMSMITH` builds its model before it is known whether there are winners
for it, and may build more models after that. A hook of torch reports every module that is
registered as a child of another module.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch.nn.modules.module import register_module_module_registration_hook

Listener = Callable[[Any], None]
"""Called with each module that becomes a child of another module."""


class _Built:
    """The modules and the listeners of this process."""

    lock = threading.RLock()
    modules: WeakSet[Any] = WeakSet()  # noqa: RUF012 - shared by the whole process
    listeners: list[Listener] = []  # noqa: RUF012 - shared by the whole process
    is_remembering = False


def remember() -> None:
    """From now on, remember modules that become children. Further calls have no effect."""
    if not _Built.is_remembering:
        _Built.is_remembering = True
        register_module_module_registration_hook(_registered)


def modules() -> list[Any]:
    with _Built.lock:
        return list(_Built.modules)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call `listener` with all remembered modules, and with new ones until the block ends."""
    with _Built.lock:
        _Built.listeners.append(listener)
        remembered = list(_Built.modules)
    try:
        for module in remembered:
            listener(module)
        yield
    finally:
        with _Built.lock:
            _Built.listeners.remove(listener)


def _registered(_module: Any, _name: str, child: Any) -> None:
    # Modules that a compiled function builds are its own, and the tracer must see no side effect.
    if torch.compiler.is_compiling() or child is None:
        return
    with _Built.lock:
        _Built.modules.add(child)
        listeners = tuple(_Built.listeners)
    for listener in listeners:
        listener(child)
