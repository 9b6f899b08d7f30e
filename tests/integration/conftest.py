"""Fixtures that several integration tests share."""

from __future__ import annotations

import pytest

from tests.support import compiled


@pytest.fixture(scope="session")
def compiled_packs(tmp_path_factory: pytest.TempPathFactory) -> compiled.CompiledPacks:
    """Real kernels, compiled once: two minutes on two cores."""
    return compiled.build(tmp_path_factory.mktemp("packs"))
