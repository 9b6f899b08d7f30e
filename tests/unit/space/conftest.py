"""What the tests of the space share: a device and a way to vary one good kernel."""

from __future__ import annotations

import pytest

from gemmsmith.core.device import DeviceModel


@pytest.fixture(scope="session")
def h200() -> DeviceModel:
    return DeviceModel(
        name="NVIDIA H200", arch="sm90", sm_count=132, memory_bytes=150 * 10**9, l2_bytes=50 << 20
    )
