"""Idle work of a worker on a real GPU: it reports the GPU, and requests re-checks.

Re-checks are jobs for idle time (`tuner.jobs.rechecks`), one after the other. An error here is
logged, and the work tried again later: it must not keep a worker from its jobs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf

import structlog

from gemmsmith.core.device import Environment
from tuner.devices.base import Device
from tuner.errors import DeviceError, StoreError
from tuner.jobs import LeasedJob, Queue, StopReason
from tuner.jobs.rechecks import Rechecks
from tuner.store import Store

log = structlog.get_logger("gemmsmith.worker")

REPORT_EVERY_S = 3600.0
"""How often a GPU is reported; it counts for 30 days, see `tuner.store.gpus`."""

LOOK_EVERY_S = 60.0
"""How often an idle worker looks for stale winners after finding none. Looking reads all winners of
its device model."""


class Idle:
    """The idle work of a worker. It does nothing on a recorded GPU.

    Args:
        environment: returns the software that the GPU runs now; may start the measuring process.
        queue: the worker's queue, if it takes only jobs of a stage; by default a queue of all jobs.
    """

    def __init__(
        self,
        store: Store,
        device: Device,
        environment: Callable[[], Environment],
        queue: Queue | None = None,
    ) -> None:
        self._store = store
        self._device = device
        self._environment = environment
        self._rechecks = Rechecks(store, queue or Queue(store), device.model.slug, device.name)
        self._report_at = self._look_at = inf if device.replayed else -inf

    def report(self) -> None:
        """Report the GPU, if that is due."""
        if time.monotonic() < self._report_at:
            return
        self._report_at = time.monotonic() + REPORT_EVERY_S
        try:
            self._store.gpus.report(self._device.model, self._environment())
        except (DeviceError, StoreError) as error:
            log.warning("gpu_not_reported", error=str(error))

    def order(self) -> None:
        """Request a re-check if a winner is stale; the worker then takes it from the queue."""
        if time.monotonic() < self._look_at:
            return
        try:
            job = self._rechecks.order()
        except StoreError as error:
            log.warning("no_recheck_ordered", error=str(error))
            job = None
        if job is None:
            self._look_at = time.monotonic() + LOOK_EVERY_S
        else:
            log.info("recheck_ordered", job=job.id, problem=str(job.problem))

    def should_stop(self, leased: LeasedJob) -> bool:
        """Whether to stop a job: because of its lease, or because it is a re-check and a job waits.

        This is called before each candidate, and every second while compiling.
        """
        try:
            if self._rechecks.outranked(leased.job):
                leased.ask_to_stop(StopReason.OUTRANKED)
        except StoreError as error:
            log.warning("orders_unknown", job=leased.job.id, error=str(error))
        return leased.should_stop()
