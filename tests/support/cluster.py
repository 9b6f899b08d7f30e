"""Ray's own local cluster: several nodes on this machine, as processes that can be killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
from ray._private import services
from ray.cluster_utils import Cluster

from tests.support.shipped import ROOT

_PATIENCE_S = 180.0
_MEMORY = 80 * 2**20
_DETECTION = {
    # A node counts as dead after two seconds of silence, as docs/fleet.md has it.
    "health_check_initial_delay_ms": 5000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}


class LocalCluster:
    """A cluster with the fleet's driver, as a context manager that ends both.

    Args:
        folder: the folder of the log.
        environ: environment variables of the driver and the workers.
    """

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self._log = folder / "driver.log"
        self._environ = {
            **os.environ,
            **environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "client"), str(ROOT)]),
            "RAY_DEDUP_LOGS": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "5",  # Ray's 15 starves workers if other processes use the cores
        }
        self._before = dict(os.environ)
        self._get_node = services.get_node
        self.nodes: list[Any] = []
        self.driver: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        os.environ.update(self._environ)  # the raylets' workers inherit it
        services.get_node = _patiently(self._get_node)
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "include_dashboard": False,
                "object_store_memory": _MEMORY,
                "_system_config": _DETECTION,
            },
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.driver is not None and self.driver.poll() is None:
            self.driver.kill()
            self.driver.wait()
        self._cluster.shutdown()  # type: ignore[no-untyped-call]
        services.get_node = self._get_node
        os.environ.clear()
        os.environ.update(self._before)
        if kind is not None:
            sys.stdout.write(self.log()[-8000:])

    def join(self, *, cores: int, gpus: Mapping[str, int]) -> None:
        """Add a node with this number of cores and these recorded GPUs."""
        node = self._cluster.add_node(
            num_cpus=cores,
            resources={name: float(count) for name, count in gpus.items()},
            object_store_memory=_MEMORY,
        )
        self.nodes.append(node)

    def lose(self, number: int) -> None:
        """SIGKILL a node's raylet, which kills all processes of the node."""
        self._cluster.remove_node(self.nodes.pop(number), allow_graceful=False)

    def drive(self) -> None:
        """Start the driver."""
        with self._log.open("ab") as log:
            self.driver = subprocess.Popen(
                [sys.executable, "-m", "tests.support.fleet_driver", self._cluster.address],
                env=self._environ,
                cwd=ROOT,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    def kill_driver(self) -> None:
        """SIGKILL the driver, and start another one."""
        assert self.driver is not None
        assert self.driver.poll() is None, self.log()[-4000:]
        self.driver.kill()
        self.driver.wait()
        self.drive()

    def end_driver(self) -> int:
        """Send SIGTERM to the driver. Returns its exit status."""
        assert self.driver is not None
        self.driver.send_signal(signal.SIGTERM)
        return self.driver.wait(60)

    def gpus(self) -> list[psutil.Process]:
        """The processes of GPUs' workers."""
        return [
            process
            for process in psutil.process_iter()
            if _title(process).startswith("ray::BriskGpu")
        ]

    def log(self) -> str:
        """The output of the driver and of its workers so far."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""


def _patiently(get_node: Callable[..., Any]) -> Callable[..., Any]:
    """Waits longer than Ray's 30 s for a new node, which is too little on busy cores."""

    def wait(*arguments: Any) -> Any:
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return get_node(*arguments)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    return wait


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
