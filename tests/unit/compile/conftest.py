"""Fixtures of the compile tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import disk


@pytest.fixture
def small_disk() -> Iterator[Path]:
    with disk.small_disk(megabytes=1) as mounted:
        yield mounted.folder
