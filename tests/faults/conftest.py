"""What the fault suite shares: chance that can be repeated."""

from __future__ import annotations

import os
import time
from random import Random

import pytest

VARIABLE = "GEMMSMITH_FAULT_SEED"


def pytest_report_header() -> str:
    """Choose the seed before anything runs; processes that run tests in parallel inherit it."""
    seed = os.environ.setdefault(VARIABLE, str(time.time_ns() % 10**6))
    return f"{VARIABLE}={seed} repeats the faults' orders and victims (not their timing)"


@pytest.fixture(
    params=["sqlite", pytest.param("postgresql", marks=[pytest.mark.postgresql, pytest.mark.long])]
)
def database_kind(request: pytest.FixtureRequest) -> str:
    """As everywhere, but `make test` makes do with one kind."""
    return str(request.param)


@pytest.fixture
def random(request: pytest.FixtureRequest) -> Random:
    """The same for a test wherever the seed is the same; a failure shows it."""
    pytest_report_header()
    print(f"{VARIABLE}={os.environ[VARIABLE]}")
    return Random(f"{os.environ[VARIABLE]} {request.node.name}")
