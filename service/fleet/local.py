"""A Ray cluster on this machine that only this user can reach.

Anyone who reaches a Ray cluster can run code in it. By default Ray listens on every network
interface, writes its token to a file with the permissions that the umask leaves, and creates
folders that everyone may write to. Here it listens on the loopback interface, the token is only in
the environment of its processes, and its folders are in a folder that only the owner may enter.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tuner.errors import TunerError

LOOPBACK = "127.0.0.1"


class NotPrivate(TunerError):
    """Ray would listen where others can connect."""


def prepare() -> None:
    """Set the variables that Ray reads when it is imported, for this process and its children."""
    # On Linux, Ray replaces 127.0.0.1 by the machine's address, in `ray.init` too. This variable is
    # its only switch for the loopback interface; on other systems 0 is the default.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


@contextmanager
def cluster(resources: Mapping[str, float]) -> Iterator[None]:
    """Start the cluster, and end it. `prepare` must have been called before Ray was imported.

    Raises:
        NotPrivate: Ray was imported before `prepare`, or its version ignores it; nothing runs.
    """
    import ray
    from ray.util import get_node_ip_address

    if get_node_ip_address() != LOOPBACK:  # type: ignore[no-untyped-call]
        raise NotPrivate(
            f"Ray {ray.__version__} cannot be kept to the loopback interface; use another version "
            "of Ray, or start a cluster yourself (ray start --head) and use --address HOST:6379"
        )
    # The path is short, because the length of sockets' paths is limited. Ray opens its own folder
    # to everyone, so it gets one below a private folder.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        ray.init(
            address="local",
            resources=dict(resources),
            include_dashboard=False,
            _temp_dir=f"{folder}/ray",
        )
        try:
            yield
        finally:
            ray.shutdown()
