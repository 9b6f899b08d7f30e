"""Modules by the names that they had until release 0.1: importing one warns, and gives the new one.

Programs should import from `gemmsmith` itself; what it lists in `__all__` stays where it is.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

_ROOMS = {
    "core": (
        *("activations", "bounds", "candidate", "choices", "device", "elements", "epilogue"),
        *("kernel", "launch", "legality", "names", "neighbours", "operands", "operation"),
        *("plain", "problem", "text", "tiles", "tuning"),
    ),
    "http": ("jobs", "progress", "trusting"),
    "program": ("built", "calls", "captured", "variables"),
    "startup": ("autocapture", "hook"),
    "winners": ("packs",),
}
_MOVED = {
    f"gemmsmith.{name}": f"gemmsmith.{room}.{name}"
    for room, names in _ROOMS.items()
    for name in names
} | {f"gemmsmith.answers.{name}": f"gemmsmith.winners.{name}" for name in ("bundle", "lookup")}


class _Moved:
    """Finds and loads moved modules. Without a base class: `importlib.abc` takes 1 ms to import."""

    def __init__(self) -> None:
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in _MOVED else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = _MOVED[spec.name]
        warnings.warn(f"{spec.name} is {new} now", DeprecationWarning, stacklevel=2)
        module = import_module(new)
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:  # the import system put the old name's there
            module.__spec__ = self._specs.pop(module.__spec__.name)


def install() -> None:
    # Last of all: only names that no other finder knows have moved.
    sys.meta_path.append(_Moved())
