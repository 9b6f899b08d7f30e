"""`gemmsmith fleet` on recorded GPUs, with leases that run out in seconds.

`python -m tests.support.fleet_driver ADDRESS`, settings from the environment, and:

- `GEMMSMITH_TEST_NVCC`, a folder: recorded GPUs need compiled packs, and the stand-in for nvcc in
  that folder makes them in `GEMMSMITH_TEST_COMPILE_S` seconds for each unit.
- `GEMMSMITH_TEST_PAUSE_S`: seconds for each candidate on a GPU.
- `GEMMSMITH_TEST_TTL_S`: duration of a lease in seconds.
- `GEMMSMITH_TEST_CORES`: cores of a compile task; 0 for no compile tasks.

The workers inherit these variables from the machines' own processes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from service import logging
from service.fleet import compiling, measuring
from service.fleet.driver import Options
from service.fleet.running import connected, run
from service.settings import Settings
from service.worker import builder
from tests.support import fake_nvcc
from tests.support.brisk_worker import screen_slowly
from tuner.compile import Toolchain
from tuner.devices.replay import ReplayDevice


def install() -> None:
    """Apply these variables to this process's recorded GPUs."""
    ReplayDevice.screen = screen_slowly  # type: ignore[method-assign]
    if "GEMMSMITH_TEST_NVCC" in os.environ:
        ReplayDevice.needs_packs = True
        builder.find_toolchain = measuring.find_toolchain = _toolchain  # type: ignore[attr-defined]


def _toolchain() -> Toolchain:
    return fake_nvcc.existing_toolchain(Path(os.environ["GEMMSMITH_TEST_NVCC"]))


class BriskGpu(measuring.GpuWorker):
    def __init__(self, order: measuring.MeasureOrder) -> None:
        install()
        super().__init__(order)


def compile_briskly(order: compiling.CompileOrder) -> int:
    install()
    return compiling.compile_jobs(order)


def main() -> None:
    settings = Settings.load()
    logging.configure(json=settings.log_json)
    options = Options(
        cores=int(os.environ.get("GEMMSMITH_TEST_CORES", "1")),
        share=os.environ.get("GEMMSMITH_TEST_SHARE", ""),
        ttl_s=float(os.environ.get("GEMMSMITH_TEST_TTL_S", "3")),
        poll_s=0.2,
        gpu_worker=BriskGpu,
        compile_jobs=compile_briskly,
    )
    with connected(sys.argv[1]):
        run(settings, options)


if __name__ == "__main__":
    main()
