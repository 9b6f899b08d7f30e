"""What a worker on a real GPU does beside its orders: it reports the GPU, and orders re-checks.

Re-checks are orders of its own (`tuner.jobs.rechecks`), for idle time, one at a time. Whatever goes
wrong here is logged and tried again later: it must not keep a worker from its orders.
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
"""How often an idle worker looks for stale winners, once it has found none: that reads all winners
of its device model."""


class Idle:
    """The idle work of one worker. On a recorded GPU there is none.

    Args:
        environment: tells what the GPU runs at the moment; may start the measuring process.
        queue: as the worker sees it, of whose orders some are not for it yet; by default all are.
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
        """Order a re-check, if something is stale; the worker then takes it from the queue."""
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
        """Whether to stop with a job: as it says itself, or because it is idle work and an order
        has come. That is noticed before the next candidate, and within a second of compiling.
        """
        try:
            if self._rechecks.outranked(leased.job):
                leased.ask_to_stop(StopReason.OUTRANKED)
        except StoreError as error:
            log.warning("orders_unknown", job=leased.job.id, error=str(error))
        return leased.should_stop()
