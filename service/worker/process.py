"""The worker's process: takes tuning jobs from the queue and runs them on its device.

Only this part of the service uses a GPU, a compiler or torch. If it is killed, at most the current
candidate is lost: its lease expires, and another worker continues from the trials in the store. On
SIGTERM or SIGINT it hands the job back before the next candidate.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path

import structlog

from gemmsmith.core.device import Environment
from gemmsmith.core.tuning import Effort
from service import identity, kernels, logging
from service.settings import Settings, SettingsError
from service.worker.builder import RecordingBuilder, open_builder
from service.worker.gpu import usable_gpu
from service.worker.idle import Idle
from service.worker.supervisor import BEAT_S, SUPERVISED
from tuner.devices import open_device
from tuner.devices.base import Device
from tuner.errors import TunerError
from tuner.jobs import LeasedJob, Queue, Worker
from tuner.merge import is_for_a_third
from tuner.search.progress import Progress
from tuner.search.run import TuningRun
from tuner.store import Store

log = structlog.get_logger("gemmsmith.worker")

RECORDED_DEVICE = "replay:nvidia-h200-132sm"
"""The device of a machine without a GPU: the recorded sweeps that are shipped with gemmsmith."""

KEEP_DEVICE_S = 30.0
"""How long the device stays open after a job: starting its process again takes about 4 s."""

PROGRESS_EVERY_S = 0.2
"""Least time between two progress events of a phase, because each is a durable write."""

THIRD_LOOKS_S = 20.0
"""How long a re-check that needs a third GPU of the model waits before workers see it again."""

THIRD_WITHIN = 10
"""Attempts of such a re-check after which any GPU runs it: the others may be busy, or gone."""

NICENESS = 10
"""Niceness of a worker beside a service, and of its compilers, so that lookups run first."""


def device_name(settings: Settings) -> str:
    return settings.device or ("cuda:0" if usable_gpu() is not None else RECORDED_DEVICE)


def open_worker_device(settings: Settings) -> Device:
    """Open the worker's device without entering it.

    Raises:
        DeviceError: there is no such device, or no such recording.
    """
    return open_device(device_name(settings), sweeps=settings.sweeps)


class Tuning:
    """Runs jobs one after the other; `tuner.jobs.Worker` calls it.

    The device stays entered between jobs, so that a queue of jobs starts the measuring process
    once. `idle` leaves it after a while without jobs, so that an idle worker holds no GPU memory.
    Compiler and packs folder are opened when a job first needs them.

    Attributes:
        compiles: whether further kernels are compiled here. Then a job that has a first winner is
            handed back until all waiting jobs have one.
    """

    compiles = True

    def __init__(
        self, settings: Settings, store: Store, device: Device, queue: Queue | None = None
    ) -> None:
        self._settings = settings
        self._store = store
        self._device = device
        self._builder: RecordingBuilder | None = None
        self._entered = ExitStack()
        self._worked_at: float | None = None  # None: the device is not entered
        self._idle = Idle(store, device, self._environment, queue)

    def begin(self) -> None:
        self._idle.report()

    def idle(self) -> None:
        """Report the GPU, request a re-check, and leave the device after a while without jobs."""
        self._idle.report()
        self._idle.order()
        if self._worked_at is not None and time.monotonic() - self._worked_at >= KEEP_DEVICE_S:
            self.close()

    def close(self) -> None:
        """Leave the device; the next job enters it again."""
        self._worked_at = None
        self._entered.close()

    def __call__(self, leased: LeasedJob) -> int | None:
        """Tune the job's problem and return the winner's revision."""
        job = leased.job
        store = self._store.fenced(leased.fence)
        self._enter()
        if self._leaves_to_a_third(leased):
            leased.release("this GPU is party to the dispute", delay_s=THIRD_LOOKS_S)
            return None
        try:
            tuning = TuningRun(
                problem=job.problem,
                device=self._device,
                store=store,
                builder=self._find_builder(store) if self._device.needs_packs else None,
                effort=job.effort,
                job=job.id,
                on_event=_reporter(leased),
                should_stop=partial(self._idle.should_stop, leased),
            )
            promises = tuning.first() is not None and tuning.further() is not None
            if promises and self.compiles and leased.put_off(names(self._device)):
                return None
            winner = tuning.finish()
        finally:
            self._worked_at = time.monotonic()  # KEEP_DEVICE_S counts from here
            if self._builder is not None:
                self._builder.report(leased)
        self._idle.report()
        median = winner.statistics.median_us if winner.statistics else None
        leased.complete(
            winner.revision,
            {
                "use": winner.use,
                "candidate": winner.candidate.key if winner.candidate else None,
                "median_us": median,
                "speedup": winner.speedup.median if winner.speedup else None,
                "revision": winner.revision,
                "device": winner.device.slug,
                **({"recorded": winner.device.name} if winner.replayed else {}),
            },
        )
        return winner.revision

    def _leaves_to_a_third(self, leased: LeasedJob) -> bool:
        """Whether a third GPU should measure a winner about which this one and another differ."""
        job, device = leased.job, self._device
        if job.effort is not Effort.RECHECK or device.replayed or job.attempt > THIRD_WITHIN:
            return False
        gpu = device.environment.gpu_uuid
        return is_for_a_third(self._store, job.problem, device.model.slug, gpu)

    def _enter(self) -> None:
        if self._worked_at is None:
            self._entered.enter_context(self._device)
            self._worked_at = time.monotonic()

    def _environment(self) -> Environment:
        self._enter()
        return self._device.environment

    def _find_builder(self, records: Store) -> RecordingBuilder:
        if self._builder is None:
            # Evictions concern the folder, not the job: they are written without the job's fence.
            self._builder = open_builder(self._settings, self._store)
        self._builder.records = records
        return self._builder


def names(device: Device) -> list[str]:
    """What a worker on the device answers to."""
    return [device.model.slug, device.name]


def run(settings: Settings, *, until_idle: bool = False) -> int:
    """Work until SIGTERM or SIGINT, or with `until_idle` until the queue is empty.

    Returns:
        The number of jobs.

    Raises:
        DeviceError: there is no such device, or no such recording.
        StoreError: the database cannot be used.
        SettingsError: the signing key cannot be used.
    """
    kernels.install_named(settings)
    with Store.open(settings.database, signer=identity.signer(settings)) as store:
        device = open_worker_device(settings)
        with closing(Tuning(settings, store, device)) as tuning:
            worker = Worker(
                Queue(store),
                tuning,
                devices=names(device),
                on_idle=tuning.idle,
            )
            log.info(
                "worker ready", device=device.name, model=device.model.name, owner=worker.owner
            )
            tuning.begin()
            return worker.run(until_idle=until_idle)


def _reporter(leased: LeasedJob) -> Callable[[Progress], None]:
    """Return a function that records progress: each change of phase, else a few times a second."""
    phase, reported_at = "", 0.0

    def report(progress: Progress) -> None:
        nonlocal phase, reported_at
        now = time.monotonic()
        # The last event of a phase is always recorded, so that pages show its end.
        complete = progress.done >= progress.total
        if progress.phase == phase and not complete and now - reported_at < PROGRESS_EVERY_S:
            return
        phase, reported_at = progress.phase, now
        leased.progress(**asdict(progress))

    return report


def _answer_supervisor() -> None:
    """Send a byte to the supervisor every second; stop this process when the supervisor has ended.

    The supervisor's socket is standard input, which is then replaced by the null device, so that
    compilers and the measuring process do not inherit the socket.
    """
    line = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    line.settimeout(BEAT_S)
    with Path(os.devnull).open() as null:
        os.dup2(null.fileno(), sys.stdin.fileno())

    def answer() -> None:
        connected = True
        while connected:
            with suppress(OSError):  # the supervisor has ended; `recv` reports it too
                line.send(b".")
            try:
                connected = bool(line.recv(1))
            except TimeoutError:  # the supervisor sends nothing while it lives
                continue
            except OSError:
                connected = False
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=answer, name="supervisor", daemon=True).start()


def main() -> int:
    """Run `python -m service.worker.process` with settings from the environment."""
    try:
        settings = Settings.load()
    except SettingsError as error:
        sys.stderr.write(f"gemmsmith worker: {error}\n")
        return 2
    logging.configure(json=settings.log_json)
    if os.environ.get(SUPERVISED):
        _answer_supervisor()
        os.nice(NICENESS)
    try:
        run(settings)
    except (SettingsError, TunerError) as error:
        log.error("worker cannot work", error=str(error))  # noqa: TRY400 - the message is for people
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
