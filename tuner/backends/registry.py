"""All backends. To add one to the project, write a folder and a line in `_ALL`.

Other packages add backends by an entry point (`tuner.backends.plugin.backend`). They are imported
on first use, and a package that cannot be is left out: `refused` says why.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from itertools import chain
from typing import NamedTuple

from gemmsmith.core.kernel import Backend, Kernel
from gemmsmith.showing import line
from tuner.backends.backend import KernelBackend
from tuner.backends.cublaslt.cublaslt import CUBLASLT
from tuner.backends.cute.cute import CUTE
from tuner.backends.cutlass2x.cutlass2x import CUTLASS2X
from tuner.backends.cutlass3x.cutlass3x import CUTLASS3X

_LOG = logging.getLogger(__name__)

_ALL: tuple[KernelBackend, ...] = (CUTLASS3X, CUTLASS2X, CUTE, CUBLASLT)

BACKENDS: dict[str, KernelBackend] = {backend.name: backend for backend in _ALL}
"""The project's own, in the order in which their kernels are listed."""

GROUP = "gemmsmith.backends"
"""The entry points that name plugins."""


class Plugins(NamedTuple):
    """The installed plugins by name, and why others are left out."""

    backends: dict[str, KernelBackend]
    refused: dict[str, str]


@cache
def plugins() -> Plugins:
    """The installed plugins, in the order of their names."""
    known, refused = dict[str, KernelBackend](), dict[str, str]()
    for point in sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value)):
        try:
            known[point.name] = _loaded(point, known)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever its import raises
            refused[point.value] = line(f"{type(error).__name__}: {error}")
            _LOG.warning("the plugin %s is left out: %s", point.value, refused[point.value])
    return Plugins(known, refused)


def every() -> list[KernelBackend]:
    """The project's own backends, then plugins."""
    return [*chain(BACKENDS.values(), plugins().backends.values())]


def backend_of(kernel: Kernel) -> KernelBackend | None:
    if kernel.backend is Backend.PLUGIN:
        return plugins().backends.get(kernel.source)
    return BACKENDS.get(kernel.source)


def _loaded(point: EntryPoint, known: dict[str, KernelBackend]) -> KernelBackend:
    from tuner.backends.plugin.backend import PluginBackend

    backend = point.load()
    if not isinstance(backend, PluginBackend):
        raise TypeError(f"it is a {type(backend).__name__}, no PluginBackend")
    if point.name != backend.name or point.name in {*known, *Backend}:
        raise ValueError(
            f"it is called {backend.name!r}, and its entry point {point.name!r}: both must have "
            "one name that no other backend has"
        )
    return backend
