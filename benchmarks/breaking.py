"""Breaks the parts of a local Ray cluster, and measures when its driver has reacted."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from tests.support import postgresql
from tests.support.cluster import LocalCluster
from tuner.jobs import Queue
from tuner.store import Store

FAULTS = ("worker", "database", "node", "driver")


@dataclass
class Breaker:
    """Breaks a cluster's parts in random order and at random moments, each kind equally often.

    Attributes:
        shares: recorded GPUs of each node.
        jobs: number of jobs that the cluster has to run.
    """

    ray: LocalCluster
    server: postgresql.Server
    store: Store
    arguments: argparse.Namespace
    shares: list[dict[str, int]]
    jobs: int

    def over(self) -> bool:
        counts = Queue(self.store).counts()
        return sum(number for state, number in counts.items() if state.terminal) == self.jobs

    def run(self) -> Iterator[dict[str, Any]]:
        """Break parts until no job is left; yield what was broken, and how long reactions took."""
        draw, began = Random(self.arguments.seed), time.monotonic()
        while True:
            for name in draw.sample(FAULTS, len(FAULTS)):
                pause = self.arguments.every_s * draw.uniform(0.5, 1.5)
                deadline = time.monotonic() + pause
                while time.monotonic() < deadline:
                    if self.over():
                        return
                    time.sleep(1.0)
                at_s = round(time.monotonic() - began, 1)
                yield {"killed": name, "at_s": at_s, **self._break(name, draw)}

    def _break(self, name: str, draw: Random) -> dict[str, float]:
        match name:
            case "worker":
                victim = draw.choice(self.ray.gpus())
                return {"worker_lost_s": self._until("gpu_dismissed", victim.kill)}
            case "database":
                self.server.restart()
            case "node":
                return self._replace_node(draw)
            case "driver":
                self.ray.kill_driver()
        return {}

    def _replace_node(self, draw: Random) -> dict[str, float]:
        """Remove a node that has GPUs, and add another one."""
        number = draw.choice([i for i, gpus in enumerate(self.shares) if gpus])
        lost = self._until("gpu_dismissed", lambda: self.ray.lose(number))
        self.shares.append(self.shares.pop(number))
        hired, began = self._logged("gpu_hired"), time.monotonic()
        self.ray.join(cores=self.arguments.cores, gpus=self.shares[-1])
        known = time.monotonic()
        wait(lambda: self._logged("gpu_hired") > hired, 120, "workers of a node", every_s=0.1)
        return {
            "node_lost_s": lost,
            "node_started_s": known - began,
            "node_joined_s": time.monotonic() - known,
        }

    def _until(self, event: str, change: Callable[[], None]) -> float:
        """Make a change, and return the seconds until the driver logs an event again."""
        before, began = self._logged(event), time.monotonic()
        change()
        wait(lambda: self._logged(event) > before, 120, event, every_s=0.1)
        return time.monotonic() - began

    def _logged(self, event: str) -> int:
        return self.ray.log().count(event)


def effects(faults: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """List how long the driver took to react to lost workers, and to lost and new nodes.

    `node_started_s` is the time in which Ray itself started a node.
    """
    names = ("worker_lost_s", "node_lost_s", "node_started_s", "node_joined_s")
    return {name: [round(fault[name], 1) for fault in faults if name in fault] for name in names}


def wait(
    condition: Callable[[], bool], patience_s: float, what: str, *, every_s: float = 0.5
) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not all {what} after {patience_s:.0f} s")
        time.sleep(every_s)
