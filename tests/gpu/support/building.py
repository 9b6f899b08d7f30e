"""Kernels that a file of tests needs, built or kept from an earlier session."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from gemmsmith.core.kernel import Kernel
from tests.support.compiled import kept
from tuner.compile import ArtifactStore, Builder, find_toolchain


def build(kernels: Iterable[Kernel]) -> tuple[ArtifactStore, dict[str, Path]]:
    """The store that holds the kernels, and the path of each kernel's pack by its name."""
    store = ArtifactStore(kept())
    paths = {}
    for built in Builder(store, find_toolchain()).build(list(kernels)):
        assert built.pack is not None, built.failure
        paths[built.kernel.name] = built.pack.path
    return store, paths
