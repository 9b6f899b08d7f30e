"""`gemmsmith worker` on the shipped recordings, with leases that run out in seconds.

`python -m tests.support.brisk_worker`, settings from the environment, and:

- `GEMMSMITH_TEST_NVCC`, a folder: the recorded device needs compiled packs, like a GPU, and the
  stand-in for nvcc in that folder makes them. A candidate whose pack is incomplete fails, as on a
  GPU.
- `GEMMSMITH_TEST_PAUSE_S`: seconds for each candidate, so that a fault occurs in the middle of a
  job.
- `GEMMSMITH_TEST_TTL_S`: duration of a lease in seconds.
- `GEMMSMITH_TEST_FREEZE`, a file: if it exists, the worker removes it in the middle of a write to
  the database, and freezes.
- `GEMMSMITH_TEST_CLOCK`, a file: the error of SQLite's clock in seconds.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from sqlalchemy import Connection, Engine, event

from gemmsmith.core.problem import Problem
from service.worker import builder, process
from tests.support import clocks, fake_nvcc
from tuner.devices.base import Contender
from tuner.devices.replay import ReplayDevice
from tuner.jobs import Worker
from tuner.measure.policy import Policy
from tuner.trial import Failure, FailureKind, Trial

TTL_S = 3.0

_screen = ReplayDevice.screen


def screen_slowly(
    device: ReplayDevice, problem: Problem, contenders: Sequence[Contender], policy: Policy
) -> Iterator[Trial]:
    """Screens one candidate after the other, each with its pack."""
    for contender in contenders:
        time.sleep(float(os.environ.get("GEMMSMITH_TEST_PAUSE_S", "0")))
        for trial in _screen(device, problem, [contender], policy):
            yield trial if _is_whole(contender.pack) else _refused(trial)


def _is_whole(pack: Path | None) -> bool:
    if pack is None:
        return not ReplayDevice.needs_packs
    return pack.exists() and hashlib.sha256(pack.read_bytes()).hexdigest() == pack.stem


def _refused(trial: Trial) -> Trial:
    failure = Failure(kind=FailureKind.REFUSED, message="the pack is not whole")
    return replace(trial, statistics=None, samples_us=(), correctness=None, failure=failure)


def freeze(connection: Connection) -> None:
    """If the test demands it, stop before a commit, holding all locks of the transaction."""
    if connection.get_execution_options().get("gemmsmith_writes"):
        with suppress(FileNotFoundError):
            Path(os.environ["GEMMSMITH_TEST_FREEZE"]).unlink()
            os.kill(os.getpid(), signal.SIGSTOP)


def main() -> int:
    ttl_s = float(os.environ.get("GEMMSMITH_TEST_TTL_S", TTL_S))
    process.Worker = partial(Worker, ttl_s=ttl_s, poll_s=0.1)  # type: ignore[misc, assignment]
    ReplayDevice.screen = screen_slowly  # type: ignore[method-assign]
    clocks.install()
    if "GEMMSMITH_TEST_FREEZE" in os.environ:
        event.listen(Engine, "commit", freeze)
    if folder := os.environ.get("GEMMSMITH_TEST_NVCC"):
        ReplayDevice.needs_packs = True
        builder.find_toolchain = lambda: fake_nvcc.toolchain(Path(folder))
    return process.main()


if __name__ == "__main__":
    sys.exit(main())
