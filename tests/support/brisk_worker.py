"""`gemmsmith worker` on the shipped recordings, with leases that run out in seconds.

`python -m tests.support.brisk_worker`, settings from the environment. Where `GEMMSMITH_TEST_NVCC`
names a folder, the recorded device wants compiled packs, as a GPU does, and the stand-in for nvcc
in that folder makes them. Where `GEMMSMITH_TEST_CLOCK` names a file, it says by how many seconds
SQLite's clock is off; it is read at every look at the clock.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

from service import builder, worker
from tests.support import clocks, fake_nvcc
from tuner.devices.replay import ReplayDevice
from tuner.jobs import Worker

TTL_S = 3.0


def main() -> int:
    worker.Worker = partial(Worker, ttl_s=TTL_S, poll_s=0.1)  # type: ignore[misc, assignment]
    clocks.install()
    if folder := os.environ.get("GEMMSMITH_TEST_NVCC"):
        ReplayDevice.needs_packs = True
        builder.find_toolchain = lambda: fake_nvcc.toolchain(Path(folder))
    return worker.main()


if __name__ == "__main__":
    sys.exit(main())
