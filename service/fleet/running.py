"""Runs a fleet's driver until a signal, or until no job is left."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import ray
import structlog

from gemmsmith.core.tuning import JobState
from service.fleet import local
from service.fleet.driver import LOOK_S, Driver, Options
from service.settings import Settings
from service.signals import handled
from tuner.errors import StoreError
from tuner.jobs.stages import Stage, StagedQueue
from tuner.store import Store

log = structlog.get_logger("gemmsmith.fleet")


@contextmanager
def connected(address: str, recorded: str = "") -> Iterator[None]:
    """Connect to the cluster at that address: `auto` is this machine's, `local` starts a new one.

    A new cluster ends with the context. It has the machine's GPUs, or one `recorded` GPU.
    `local.prepare` must have been called before Ray was imported.

    Raises:
        ConnectionError: there is no cluster.
        NotPrivate: others could connect to the new cluster.
    """
    if address == "local":
        with local.cluster({recorded: 1.0} if recorded else {}):
            yield
        return
    ray.init(address=address)
    try:
        yield
    finally:
        ray.shutdown()


def run(settings: Settings, options: Options, *, until_idle: bool = False) -> None:
    """Run a fleet until SIGTERM or SIGINT, or with `until_idle` until no job waits or runs.

    Raises:
        StoreError: the database cannot be used at the start.
        OneMachineOnly: the database is a file, and the cluster has several machines.
    """
    with Store.open(settings.database) as store, _signals() as stopping:
        driver = Driver(settings=settings, queue=StagedQueue(store, Stage.COMPILE), options=options)
        log.info("fleet ready", driver=driver.name)
        driver.end_others()
        ready = -1
        try:
            while not stopping.is_set():
                began = time.monotonic()
                try:
                    driver.look()
                    if until_idle and _is_idle(driver.queue):
                        break
                except StoreError as error:
                    log.warning("store_unavailable", error=str(error))
                if driver.ready() != ready:
                    ready = driver.ready()
                    log.info("gpus_ready", gpus=ready, of=len(driver.workers))
                stopping.wait(max(0.0, LOOK_S - (time.monotonic() - began)))
        finally:
            driver.stop()


def _is_idle(queue: StagedQueue) -> bool:
    counts = queue.counts()
    return not counts[JobState.WAITING] and not counts[JobState.RUNNING]


@contextmanager
def _signals() -> Iterator[threading.Event]:
    """Yield an event that SIGTERM and SIGINT set; a second SIGINT ends the process at once."""
    stopping = threading.Event()

    def stop(number: int, _frame: object) -> None:
        stopping.set()
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)

    with handled((signal.SIGTERM, signal.SIGINT), stop):
        yield stopping
