"""The worker's process: takes tuning jobs from the queue and runs them on its device.

This is the only part of the service that touches a GPU, a compiler or torch. Killed at any time
it loses at most the candidate in flight: its lease expires, and another worker continues from the
trials in the store. SIGTERM or SIGINT hands the job back between two candidates.
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
from service import identity, logging
from service.settings import Settings, SettingsError
from service.worker.builder import RecordingBuilder, Tally, open_builder
from service.worker.gpu import usable_gpu
from service.worker.idle import Idle
from service.worker.supervisor import BEAT_S
from tuner.devices import open_device
from tuner.devices.base import Device
from tuner.errors import LeaseLost, StoreError, TunerError
from tuner.jobs import LeasedJob, Queue, Worker
from tuner.merge import is_for_a_third
from tuner.search.cost_model import AnalyticModel
from tuner.search.progress import Progress
from tuner.search.run import tune
from tuner.store import Store

log = structlog.get_logger("gemmsmith.worker")

RECORDED_DEVICE = "replay:nvidia-h200-132sm"
"""What stands in for a GPU where there is none: the sweeps shipped with gemmsmith."""

KEEP_DEVICE_S = 30.0
"""How long the device stays entered after a job: starting its process again costs about 4 s."""

PROGRESS_EVERY_S = 0.2
"""Least time between two progress events of a phase; each is a durable write."""

THIRD_LOOKS_S = 20.0
"""How long a re-check that this GPU should not make waits for another one of the model."""

THIRD_WITHIN = 10
"""Attempts of such a re-check after which any GPU makes it: the others may be busy, or gone."""

NICENESS = 10
"""Of a worker beside a service, and of its compilers: lookups have the processor first."""

SUPERVISED = "GEMMSMITH_SUPERVISED"
"""Set by `service.worker.supervisor`: standard input is its socket."""


def device_name(settings: Settings) -> str:
    """What this machine's worker measures on."""
    return settings.device or ("cuda:0" if usable_gpu() is not None else RECORDED_DEVICE)


def open_worker_device(settings: Settings) -> Device:
    """The worker's device, not entered yet.

    Raises:
        DeviceError: there is no such device, or no such recording.
    """
    return open_device(device_name(settings), sweeps=settings.sweeps)


class Tuning:
    """Works on one job after the other; what `tuner.jobs.Worker` calls.

    The device stays entered from one job to the next, so that a queue of jobs starts the measuring
    process once; `rest` leaves it when no job has come for a while, so an idle worker holds no GPU
    memory. Compiler and artifact store are looked for when the first job needs them.
    """

    def __init__(
        self, settings: Settings, store: Store, device: Device, queue: Queue | None = None
    ) -> None:
        self._settings = settings
        self._store = store
        self._device = device
        self._ranker = AnalyticModel()
        self._builder: RecordingBuilder | None = None
        self._entered = ExitStack()
        self._worked_at: float | None = None  # None: the device is not entered
        self._idle = Idle(store, device, self._environment, queue)

    def begin(self) -> None:
        """Let it be known what this GPU runs, before the first job."""
        self._idle.report()

    def idle(self) -> None:
        """What there is to do without a job: order a re-check, or leave the device for a while."""
        self._idle.report()
        self._idle.order()
        self._rest()

    def _rest(self) -> None:
        """Leave the device if the last job ended KEEP_DEVICE_S ago or earlier."""
        if self._worked_at is not None and time.monotonic() - self._worked_at >= KEEP_DEVICE_S:
            self.close()

    def close(self) -> None:
        """Leave the device; the next job enters it again."""
        self._worked_at = None
        self._entered.close()

    def __call__(self, leased: LeasedJob) -> int | None:
        """Tune the job's problem; the winner's revision."""
        job = leased.job
        store = self._store.fenced(leased.fence)
        self._enter()
        if self._leaves_to_a_third(leased):
            leased.release("this GPU is party to the dispute", delay_s=THIRD_LOOKS_S)
            return None
        try:
            winner = tune(
                job.problem,
                device=self._device,
                store=store,
                builder=self._find_builder(store) if self._device.needs_packs else None,
                ranker=self._ranker,
                effort=job.effort,
                job=job.id,
                on_event=_reporter(leased),
                should_stop=partial(self._idle.should_stop, leased),
            )
        finally:
            self._worked_at = time.monotonic()
            self._report_built(leased)
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
        """Whether another GPU should measure again what this one and a third party differ about."""
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

    def _report_built(self, leased: LeasedJob) -> None:
        """Let `/metrics` know what the attempt built, however it ended."""
        if self._builder is None or self._builder.tally == Tally():
            return
        tally, self._builder.tally = self._builder.tally, Tally()
        with suppress(LeaseLost, StoreError):  # these figures are not worth an attempt
            leased.event("built", asdict(tally))

    def _find_builder(self, records: Store) -> RecordingBuilder:
        if self._builder is None:
            # The folder says what is evicted, whoever has the job: that is written without a fence.
            self._builder = open_builder(self._settings, self._store)
        self._builder.records = records
        return self._builder


def run(settings: Settings, *, until_idle: bool = False) -> int:
    """Work until SIGTERM or SIGINT (with `until_idle`: until the queue is empty); jobs worked on.

    Raises:
        DeviceError: there is no such device, or no such recording.
        StoreError: the database cannot be used.
        SettingsError: the key that winners are signed with cannot.
    """
    with Store.open(settings.database, signer=identity.signer(settings)) as store:
        device = open_worker_device(settings)
        with closing(Tuning(settings, store, device)) as tuning:
            worker = Worker(
                Queue(store),
                tuning,
                devices=[device.model.slug, device.name],
                on_idle=tuning.idle,
            )
            log.info(
                "worker ready", device=device.name, model=device.model.name, owner=worker.owner
            )
            tuning.begin()
            return worker.run(until_idle=until_idle)


def _reporter(leased: LeasedJob) -> Callable[[Progress], None]:
    """Passes progress on to the job: every change of phase, else a few a second."""
    phase, spoke = "", 0.0

    def report(progress: Progress) -> None:
        nonlocal phase, spoke
        now = time.monotonic()
        complete = progress.done >= progress.total
        if progress.phase == phase and not complete and now - spoke < PROGRESS_EVERY_S:
            return
        phase, spoke = progress.phase, now
        leased.progress(
            progress.phase,
            progress.done,
            progress.total,
            progress.best_us,
            progress.best,
            progress.message,
            progress.recorded,
        )

    return report


def _answer_supervisor() -> None:
    """Say again and again that this process runs; when the supervisor ends, SIGTERM to ourselves.

    By its socket, which is standard input. The programs that this one starts get nothing of it.
    """
    line = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    line.settimeout(BEAT_S)
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())

    def answer() -> None:
        there = True
        while there:
            with suppress(OSError):  # nobody there; `recv` says so as well
                line.send(b".")
            try:
                there = bool(line.recv(1))
            except TimeoutError:
                continue
            except OSError:
                there = False
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=answer, name="supervisor", daemon=True).start()


def main() -> int:
    """`python -m service.worker.process`: settings from the environment; the exit status."""
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
        log.error("worker cannot work", error=str(error))  # noqa: TRY400 - made for people
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
