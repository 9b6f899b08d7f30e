"""Kernels that a file of tests needs, built or found in GEMMSMITH_PACKS."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from gemmsmith.core.kernel import Kernel
from tuner.compile import ArtifactStore, Builder, find_toolchain


def build(
    wanted: Iterable[Kernel], folders: pytest.TempPathFactory
) -> tuple[ArtifactStore, dict[str, Path]]:
    """The store that holds them, and each one's pack by its name; all of them compile."""
    store = ArtifactStore(Path(os.environ.get("GEMMSMITH_PACKS") or folders.mktemp("packs")))
    found = {}
    for each in Builder(store, find_toolchain()).build(list(wanted)):
        assert each.pack is not None, each.failure
        found[each.kernel.name] = each.pack.path
    return store, found
