"""A fleet's compilers: they take jobs whose kernels are not compiled, and compile them.

A compiler is a worker: it leases a job from the database, and hands it back when its kernels are in
packs, so that a GPU can measure them. If it dies, its lease ends, and the next compiler uses the
packs that it has built.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import AnyKernel
from service import identity, logging
from service.fleet.packs import Share
from service.fleet.plan import RECORDED
from service.settings import Settings
from service.worker.builder import RecordingBuilder, open_builder
from tuner.backends import candidates
from tuner.backends.cublaslt.algorithms import kernel_for
from tuner.devices import open_device
from tuner.devices.base import Device
from tuner.errors import NoLegalCandidate, NotRecorded
from tuner.jobs import Job, LeasedJob, Worker
from tuner.jobs.stages import Stage, StagedQueue, hand_to_gpus
from tuner.search.budget import BUDGETS
from tuner.search.hints import first_kernels
from tuner.search.packs import in_batches
from tuner.store import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetGpu:
    """A kind of GPU in the fleet: its name for `open_device`, and its model."""

    name: str
    model: DeviceModel

    @property
    def names(self) -> tuple[str, str]:
        return (self.model.slug, self.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerOrder:
    """What every worker of a fleet is started with.

    Attributes:
        environ: the settings, as environment variables.
        owner: the owner of its leases, a name that was not used before.
        share: URL of the packs that the fleet shares; empty if all machines mount one folder.
        ttl_s: how long a lease lasts without a heartbeat.
    """

    environ: Mapping[str, str]
    owner: str
    share: str = ""
    ttl_s: float = 60.0

    def open_share(self, settings: Settings) -> Share | None:
        return Share(self.share, identity.trusted_packs(settings)) if self.share else None


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileOrder(WorkerOrder):
    """The argument of a compile task.

    Attributes:
        devices: the GPUs that the jobs will be measured on.
        cores: how many compilers run at once.
    """

    devices: Sequence[FleetGpu]
    cores: int


def compile_jobs(order: CompileOrder) -> int:
    """Compile for one job after the other until no job needs it.

    Returns:
        The number of jobs.

    Raises:
        CompilerNotFound: there is no nvcc on this machine. No job was taken.
        StoreError, SettingsError: the database or the keys cannot be used.
    """
    settings = Settings.load(order.environ)
    logging.configure(json=settings.log_json)
    with Store.open(settings.database, signer=identity.signer(settings)) as store:
        queue = StagedQueue(store, Stage.COMPILE)
        builder = open_builder(settings, store, order.cores)
        worker = Worker(
            queue,
            Preparation(settings, store, queue, builder, order),
            devices=[name for device in order.devices for name in device.names],
            owner=order.owner,
            ttl_s=order.ttl_s,
        )
        return worker.run(until_idle=True)


class Preparation:
    """Compiles the kernels of jobs, one job after the other; `tuner.jobs.Worker` calls it."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        queue: StagedQueue,
        builder: RecordingBuilder,
        order: CompileOrder,
    ) -> None:
        self._settings = settings
        self._store = store
        self._queue = queue
        self._builder = builder
        self._devices = order.devices
        self._share = order.open_share(settings)
        self._recorded: dict[str, Device] = {}

    def __call__(self, leased: LeasedJob) -> None:
        """Compile the kernels that the job's run requested, or begins with; hand it to the GPUs."""
        store = self._builder.records = self._store.fenced(leased.fence)
        kernels, failures = self._kernels(leased, store)
        packs, done, job = {}, 0, leased.job
        with closing(in_batches(self._builder, kernels, leased.should_stop)) as batches:
            for batch in batches:
                for built in batch:
                    if built.pack is not None:
                        packs[built.pack.hash] = built.pack
                    elif built.failure is not None:
                        failures[built.kernel.name] = built.failure.message
                done += len(batch)
                leased.progress("compile", done, len(kernels), job.best_us, job.best)
        if self._share is not None:
            self._share.push(self._builder.store, packs.values())
        self._builder.report(leased)
        hand_to_gpus(leased, list(packs), failures)

    def _kernels(self, leased: LeasedJob, store: Store) -> tuple[list[AnyKernel], dict[str, str]]:
        """Return the kernels to build, and a failure for each requested name that is unknown."""
        job = leased.job
        device, choices = self._choices(job)
        requested = self._queue.notes(job.id).wanted
        if not requested:
            first = first_kernels(
                job.problem,
                choices,
                device.model,
                store=store,
                builder=self._builder,
                effort=job.effort,
            )
            return first, {}
        known = {candidate.kernel.name: candidate.kernel for candidate in choices}
        library: AnyKernel | None = kernel_for(job.problem, device.model.arch)
        if library is not None:
            known[library.name] = library
        unknown = {
            name: "the compilers know no such kernel" for name in requested if name not in known
        }
        return [known[name] for name in requested if name in known], unknown

    def _choices(self, job: Job) -> tuple[FleetGpu, list[Candidate]]:
        """Return the device that a job is for, and the candidates that its run chooses from.

        Raises:
            NotRecorded: the job is for recorded devices, and none has its problem.
        """
        reason: NotRecorded | None = None
        for device in self._devices:
            if job.device not in ("", *device.names):
                continue
            if not device.name.startswith(RECORDED):
                with suppress(NoLegalCandidate):  # the run then measures the default only
                    level = BUDGETS[job.effort].level
                    return device, candidates(job.problem, device.model, level=level)
                return device, []
            try:
                recorded = self._open(device.name).recorded(job.problem)
            except NotRecorded as error:
                reason = error
                continue
            return device, list(recorded or ())
        raise reason or NotRecorded(f"no GPU of this fleet is called {job.device!r}")

    def _open(self, name: str) -> Device:
        """Open a recorded device, and keep it, because loading a recording takes a while."""
        if name not in self._recorded:
            self._recorded[name] = open_device(name, sweeps=self._settings.sweeps)
        return self._recorded[name]
