"""Fixtures that several integration tests share."""

from __future__ import annotations

import fcntl

import pytest

from tests.support import compiled


@pytest.fixture(scope="session")
def compiled_packs(request: pytest.FixtureRequest) -> compiled.CompiledPacks:
    """Real kernels, those that the chosen tests want: two minutes on two cores, if all are new.

    Of processes that run tests in parallel one compiles, and the others wait for it.
    """
    long = any(item.get_closest_marker("long") for item in request.session.items)
    root = compiled.kept()
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return compiled.build(root, compiled.KERNELS if long else compiled.QUICK)
