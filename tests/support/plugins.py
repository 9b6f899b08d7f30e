"""Plugins as other packages add them: a module beside an entry point, in a folder of packages."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gemmsmith.core.kernel import PluginKernel
from gemmsmith.core.problem import Layout
from tuner import backends
from tuner.backends import registry, unit
from tuner.backends.plugin.cubin import INCLUDE

__all__ = ["INCLUDE", "PLAIN", "POINT", "beside", "plain", "write"]

PLAIN = """
from gemmsmith.core.kernel import PluginKernel
from gemmsmith.core.operation import Operation
from tuner.backends.plugin import cubin
from tuner.backends.plugin.backend import PluginBackend

class Plain(PluginBackend):
    name = "plain"

    def listed(self, operation, arch):
        if operation != Operation.of("bf16", "tn") or arch.name != "sm90":
            return []
        return [
            PluginKernel(
                name=f"plain_{tile}", plugin="plain", arch="sm90", dtype="bf16", layout="tn",
                alignment_a=8, alignment_b=8, alignment_d=8, tile=(tile, tile, 64),
            )
            for tile in (64, 128, 256)
        ]

    def part(self, kernel):
        tile = kernel.tile[0]
        return cubin.part(
            kernel,
            origin=["compiler 1"],
            grid=(f"tiles(g.m, {tile})", f"tiles(g.n, {tile})", "g.batch"),
            parameters=("g.a", "g.b", "g.d", "g.m", "g.n", "g.k", "g.ldd", "g.alpha", "g.bias"),
            takes="g.beta == 0",
            reads="kBias",
        )

    def files(self, kernel):
        if kernel.tile[0] == 256:
            raise ValueError("256 does not fit")
        return cubin.files(
            kernel, b"\\x00code\\xff", function="plain", threads=128, shared_bytes=70000
        )

BACKEND = Plain()
"""
"""A plugin whose cubins are no machine code: the host's half of it works without a GPU."""

POINT = "plain = plain_plugin:BACKEND"


def plain(tile: int) -> PluginKernel:
    """A kernel of the plugin `PLAIN`; that of 256 does not compile."""
    return PluginKernel(
        name=f"plain_{tile}",
        plugin="plain",
        arch="sm90",
        dtype="bf16",
        layout=Layout.TN,
        alignment_a=8,
        alignment_b=8,
        alignment_d=8,
        tile=(tile, tile, 64),
    )


@contextmanager
def beside(folder: Path) -> Iterator[None]:
    """The packages of a folder are installed, here and in this process's children."""
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    modules = {*sys.modules}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", path)
        _forget()
        try:
            yield
        finally:
            for name in {*sys.modules} - modules:
                if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
                    del sys.modules[name]
    _forget()


def write(folder: Path, module: str = PLAIN, *points: str, package: str = "plain_plugin") -> None:
    """Put a package of one module into the folder, with these lines as its entry points."""
    information = folder / f"{package}-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = "\n".join(points or [POINT])
    (information / "entry_points.txt").write_text(f"[{registry.GROUP}]\n{lines}\n")
    (folder / f"{package}.py").write_text(module)


def _forget() -> None:
    for known in (registry.plugins, backends.supporting, unit.kernel_digest, unit._part):
        known.cache_clear()
