"""torch's ways without a compiler."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tuner.workloads import ways


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ways, "COMPILER", "eager")
    yield
    torch._dynamo.reset()
