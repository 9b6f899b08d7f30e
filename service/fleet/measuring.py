"""A GPU of a fleet: the worker's loop, in a process that Ray has placed on the GPU's machine.

It is the loop of `gemmsmith worker`: leases, heartbeats and fences are in the database. But it
compiles nothing if the fleet has compilers: a job that lacks kernels goes back to them, and the GPU
measures another one meanwhile.
"""

from __future__ import annotations

import threading
from contextlib import closing
from dataclasses import dataclass

import structlog

from service import identity, logging
from service.fleet.compiling import FleetGpu, WorkerOrder
from service.fleet.packs import Share
from service.fleet.prepared import KernelsWanted, PreparedBuilder
from service.settings import Settings
from service.worker.builder import RecordingBuilder, open_artifacts
from service.worker.process import Tuning
from tuner.compile import find_toolchain
from tuner.devices import open_device
from tuner.devices.base import Device
from tuner.errors import StoreError, TunerError
from tuner.jobs import LeasedJob, Worker
from tuner.jobs.stages import Stage, StagedQueue, hand_to_compilers
from tuner.store import Store

log = structlog.get_logger("gemmsmith.fleet")

MOST_ROUNDS = 8
"""How often a job may request kernels. A run does so two or three times. If it goes on, the packs
do not reach the GPU, and the job fails."""

_RETRY_S = 1.0


class PacksMissing(TunerError):
    """The packs of the fleet's compilers do not reach this machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureOrder(WorkerOrder):
    """The argument of a GPU's worker.

    Attributes:
        device: the device to measure on, as for `tuner.devices.open_device`.
        compilers: whether the fleet has compilers; else this worker compiles its kernels.
        poll_s: how often it looks for a job if it has none.
    """

    device: str
    compilers: bool = True
    poll_s: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """The state of a GPU's worker.

    Attributes:
        owner: the owner of its leases.
        device: the device that it measures on; None until it is open.
        staged: whether the fleet's compilers compile for its jobs.
        error: why it cannot work; empty while it can.
    """

    owner: str
    device: FleetGpu | None
    staged: bool
    error: str = ""


class StagedTuning(Tuning):
    """Tunes with kernels that are compiled, and hands jobs that lack some to the compilers."""

    compiles = False

    def __init__(
        self,
        settings: Settings,
        store: Store,
        device: Device,
        queue: StagedQueue,
        builder: PreparedBuilder,
        share: Share | None,
    ) -> None:
        super().__init__(settings, store, device, queue)
        self._queue = queue
        self._prepared = builder
        self._share = share

    def __call__(self, leased: LeasedJob) -> int | None:
        """See `Tuning`. Returns None for a job that was handed to the compilers.

        Raises:
            PacksMissing: the job was handed to them `MOST_ROUNDS` times.
        """
        job = leased.job
        notes = self._queue.notes(job.id)
        # Packs that cannot be taken stay missing: the run then requests their kernels again.
        if self._share is not None:
            self._share.pull(self._prepared.store, notes.packs)
        history = self._store.history(job.problem, self._device.model.slug)
        promoted = any(winner.job == job.id for winner in history)
        self._prepared.failures = notes.failures
        self._prepared.later = notes.wanted if promoted else ()
        try:
            return super().__call__(leased)
        except KernelsWanted as missing:
            if notes.rounds >= MOST_ROUNDS:
                name = missing.kernels[0].name
                raise PacksMissing(
                    f"{name} was requested {notes.rounds} times and is not here: "
                    "do all machines see one packs folder or share, and trust its keys?"
                ) from None
            hand_to_compilers(leased, [kernel.name for kernel in missing.kernels])
            return None

    def _find_builder(self, records: Store) -> RecordingBuilder:
        self._prepared.records = records
        return self._prepared


class GpuWorker:
    """A GPU's worker, as a Ray actor. It works in a thread, so that the actor can answer calls."""

    def __init__(self, order: MeasureOrder) -> None:
        self._order = order
        self._settings = Settings.load(order.environ)
        self._worker: Worker | None = None
        self._device: FleetGpu | None = None
        self._staged = False
        self._error = ""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="worker", daemon=True)
        logging.configure(json=self._settings.log_json)

    def beat(self) -> Beat:
        """Return the state of the worker; the first call starts it."""
        if not self._thread.ident:
            self._thread.start()
        return Beat(
            owner=self._order.owner, device=self._device, staged=self._staged, error=self._error
        )

    def stop(self) -> None:
        """Hand the current job back before its next candidate, and end."""
        self._stopping.set()
        if self._worker is not None:
            self._worker.stop()
        if self._thread.ident:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._work()
            except StoreError as error:  # at the start; later the worker's loop waits by itself
                log.warning("store_unavailable", error=str(error))
                self._stopping.wait(_RETRY_S)
            except Exception as error:  # reported to the driver, which tries again later
                log.exception("gpu_cannot_work")
                self._error = f"{type(error).__name__}: {error}"
                return

    def _work(self) -> None:
        order, settings = self._order, self._settings
        device = open_device(order.device, sweeps=settings.sweeps)
        staged = order.compilers and device.needs_packs
        with Store.open(settings.database, signer=identity.signer(settings)) as store:
            queue = StagedQueue(store, Stage.MEASURE if staged else None)
            with closing(
                self._tuning(store, device, queue) if staged else Tuning(settings, store, device)
            ) as tuning:
                self._worker = Worker(
                    queue,
                    tuning,
                    devices=[device.model.slug, device.name],
                    owner=order.owner,
                    ttl_s=order.ttl_s,
                    poll_s=order.poll_s,
                    on_idle=tuning.idle,
                )
                self._staged = staged
                self._device = FleetGpu(name=device.name, model=device.model)
                log.info("gpu ready", device=device.name, model=device.model.name)
                tuning.begin()
                if not self._stopping.is_set():
                    self._worker.run()

    def _tuning(self, store: Store, device: Device, queue: StagedQueue) -> StagedTuning:
        settings = self._settings
        builder = PreparedBuilder(open_artifacts(settings, store), find_toolchain(), store)
        share = self._order.open_share(settings)
        return StagedTuning(settings, store, device, queue, builder, share)
