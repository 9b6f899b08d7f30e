"""The torch modules that a process builds: remembered from when torch is imported, patched later.

torch tells of every module that becomes a part of another. A program that `GEMMSMITH` switches on
builds its model before it is known whether there are winners for it, and may build more after that.
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
"""Takes a module that has become a part of another one."""


class _Built:
    """What this process has built, and who is told of it."""

    lock = threading.RLock()
    modules: WeakSet[Any] = WeakSet()  # noqa: RUF012 - one a process
    listeners: list[Listener] = []  # noqa: RUF012 - one a process
    is_remembering = False


def remember() -> None:
    """From now on, remember modules that become parts of others; called again, nothing."""
    if not _Built.is_remembering:
        _Built.is_remembering = True
        register_module_module_registration_hook(_registered)


def modules() -> list[Any]:
    """Those that are remembered and alive."""
    with _Built.lock:
        return list(_Built.modules)


@contextmanager
def told(listener: Listener) -> Iterator[None]:
    """Tell of all modules that are remembered, and of those to come until the block ends."""
    with _Built.lock:
        _Built.listeners.append(listener)
        before = list(_Built.modules)
    try:
        for module in before:
            listener(module)
        yield
    finally:
        with _Built.lock:
            _Built.listeners.remove(listener)


def _registered(_module: Any, _name: str, part: Any) -> None:
    """As torch calls its hooks; None leaves the part as it is."""
    # What a compiled function builds, it builds for itself: a tracer must find nothing here.
    if torch.compiler.is_compiling() or part is None:
        return
    with _Built.lock:
        _Built.modules.add(part)
        listeners = tuple(_Built.listeners)
    for listener in listeners:
        listener(part)
