"""Kernels that a file of tests needs, built or kept from an earlier session."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from gemmsmith.core.config import Config
from gemmsmith.core.kernel import Kernel
from gemmsmith.core.launch import Launch
from gemmsmith.ops.engine.forms import Shape
from gemmsmith.ops.engine.plan import Plan
from gemmsmith.ops.engine.platform import Cuda
from gemmsmith.runtime.pack import LoadedPack
from tests.support.compiled import kept
from tuner.compile import ArtifactStore, Builder, find_toolchain

BUILD_ONLY = os.environ.get("GEMMSMITH_GPU_TESTS") == "build"
"""Whether the tests' kernels are built, all at once, and no test runs."""

_needed: dict[str, Kernel] = {}


def need(kernels: Iterable[Kernel]) -> None:
    """If no test runs, leave the kernels to `build_needed`, and skip the test that needs them."""
    if BUILD_ONLY:
        _needed.update((kernel.name, kernel) for kernel in kernels)
        pytest.skip("its kernels are built")


def build_needed() -> None:
    """Build the kernels of all skipped tests; few large units cost less than many small ones."""
    for built in Builder(ArtifactStore(kept()), find_toolchain()).build(list(_needed.values())):
        if built.failure is not None:
            print(f"\n{built.kernel.name} does not compile: {built.failure.message}")


def build(kernels: Iterable[Kernel]) -> tuple[ArtifactStore, dict[str, Path]]:
    """The store that holds the kernels, and the path of each kernel's pack by its name."""
    kernels = list(kernels)
    need(kernels)
    store = ArtifactStore(kept())
    paths = {}
    for built in Builder(store, find_toolchain()).build(kernels):
        assert built.pack is not None, built.failure
        paths[built.kernel.name] = built.pack.path
    return store, paths


def plan_of(kernel: Kernel, shape: Shape, built: dict[str, Path]) -> Plan:
    """One launch of a kernel as the library makes it."""
    config = Config(kernel=kernel, launch=Launch(), pack="a" * 64)
    loaded = LoadedPack.open(built[kernel.name]).kernel(kernel.name)
    return Plan(config, shape, loaded, Cuda(), torch.device("cuda", 0), 0)
