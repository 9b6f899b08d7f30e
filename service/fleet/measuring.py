"""One GPU of a fleet: the worker's loop, in a process that Ray has placed beside the GPU.

It is the loop of `gemmsmith worker`: leases, heartbeats and the fence are the database's. What
differs is that it compiles nothing, where the fleet has compilers: a job that lacks kernels goes
back to them, and the GPU measures another one meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass

import structlog

from service import identity, logging
from service.fleet.compiling import FleetGpu
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
"""How often one job may ask for kernels. A run asks twice or three times; one that asks for ever
does not get what was compiled, and fails."""

_AGAIN_S = 1.0


class PacksMissing(TunerError):
    """What the compilers have built does not reach this machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureOrder:
    """What a GPU's worker is given.

    Attributes:
        environ: the settings, as environment variables.
        owner: the name that its leases have; none had it before.
        device: what to measure on, as `tuner.devices.open_device` names it.
        compilers: the fleet has some; else this worker compiles what it needs.
        share: URL of the packs that the fleet shares; empty where all mount one folder.
    """

    environ: Mapping[str, str]
    owner: str
    device: str
    compilers: bool = True
    share: str = ""
    ttl_s: float = 60.0
    poll_s: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """What a GPU's worker says when it is asked.

    Attributes:
        owner: the name that its leases have.
        device: what it measures on; None until it has been opened.
        staged: its jobs are compiled by others.
        error: why it cannot work; empty while it can.
    """

    owner: str
    device: FleetGpu | None
    staged: bool
    error: str = ""


class StagedTuning(Tuning):
    """Tunes with what is built, and hands jobs to the compilers that lack something."""

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
        """As `Tuning`; None for a job that was handed to the compilers.

        Raises:
            PacksMissing: it was handed to them too often.
        """
        job = leased.job
        notes = self._queue.notes(job.id)
        if self._share is not None:
            self._share.pull(self._prepared.store, notes.packs)
        history = self._store.history(job.problem, self._device.model.slug)
        answered = any(winner.job == job.id for winner in history)
        self._prepared.failures = notes.failures
        self._prepared.later = notes.wanted if answered else ()
        try:
            return super().__call__(leased)
        except KernelsWanted as wanted:
            if notes.rounds >= MOST_ROUNDS:
                raise PacksMissing(
                    f"{wanted.kernels[0].name} was requested {notes.rounds} times and is not here: "
                    "do all machines see one packs folder or share, and trust its keys?"
                ) from None
            hand_to_compilers(leased, [kernel.name for kernel in wanted.kernels])
            return None

    def _find_builder(self, records: Store) -> RecordingBuilder:
        self._prepared.records = records
        return self._prepared


class GpuWorker:
    """A GPU's worker, in a thread, so that its process answers meanwhile. Ray makes it an actor."""

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
        """Say how it is; the first call starts the work."""
        if not self._thread.ident:
            self._thread.start()
        return Beat(
            owner=self._order.owner, device=self._device, staged=self._staged, error=self._error
        )

    def stop(self) -> None:
        """Hand the job in hand back between two candidates, and end."""
        self._stopping.set()
        if self._worker is not None:
            self._worker.stop()
        if self._thread.ident:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._work()
            except StoreError as error:  # before the loop, which waits for the database itself
                log.warning("store_unavailable", error=str(error))
                self._stopping.wait(_AGAIN_S)
            except Exception as error:  # the driver is told, which tries again later
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
        url = self._order.share
        share = Share(url, identity.trusted_packs(settings)) if url else None
        return StagedTuning(settings, store, device, queue, builder, share)
