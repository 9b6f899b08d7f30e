"""Fixtures that several integration tests share."""

from __future__ import annotations

import fcntl
import os

import pytest

from tests.support import compiled


@pytest.fixture(scope="session")
def compiled_packs(tmp_path_factory: pytest.TempPathFactory) -> compiled.CompiledPacks:
    """Real kernels, compiled once: two minutes on two cores.

    Of processes that run tests in parallel one compiles, and the others wait for it.
    """
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    with (root / "packs.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return compiled.build(root / "packs")
