"""A local Ray cluster starts only where no one else can connect to it."""

from __future__ import annotations

import pytest
import ray
import ray.util

from service.fleet.local import NotPrivate
from service.fleet.running import connected


def test_no_cluster_is_started_that_would_listen_on_other_interfaces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "192.0.2.7")
    with pytest.raises(NotPrivate, match="ray start --head"), connected("local"):
        pass
    assert not ray.is_initialized()
