"""Simulates a GPU on the host: streams, events and graphs for otherwise real code.

The kernels are in C, compiled into a real pack (`host_pack.c`).
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from gemmsmith.core.device import DeviceModel
from tuner.backends.cutlass import HEADERS

INCLUDE = HEADERS
SOURCE = Path(__file__).parents[1] / "unit" / "measure" / "host_pack.c"
MODEL = DeviceModel(name="host", arch="sm90", sm_count=4, memory_bytes=16 * 2**30, l2_bytes=20_000)


def build_pack(folder: Path) -> Path:
    """Compile the host's kernels into a pack in `folder`."""
    path = folder / "host.so"
    command = ["gcc", "-O2", "-shared", "-fPIC", f"-I{INCLUDE}", str(SOURCE), "-o", str(path)]
    subprocess.run(command, check=True)
    return path


class HostStream:
    pointer = 0

    def torch(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class HostEvent:
    def __init__(self) -> None:
        self.at = 0.0

    def record(self, stream: object) -> None:
        self.at = time.perf_counter() * 1e6

    def wait(self) -> None:
        pass

    def microseconds_since(self, start: HostEvent) -> float:
        return self.at - start.at


class HostGraph:
    def __init__(self, stream: object, launches: int, launch: Callable[[int], None]) -> None:
        self.launches, self._launch = launches, launch
        launch(0)

    def enqueue(self) -> None:
        for i in range(self.launches):
            self._launch(i)

    def close(self) -> None:
        pass
