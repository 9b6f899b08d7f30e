"""What a fleet's compilers do: they take jobs whose kernels are not compiled, and compile them.

Each is a worker as any other: it leases a job from the database, keeps the lease, and hands the job
back when its kernels are in packs, for a GPU to measure. One that dies loses nothing: its lease
ends, and what it has built is found by the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import AnyKernel
from gemmsmith.core.problem import Problem
from service import identity, logging
from service.fleet.packs import Share
from service.settings import Settings
from service.worker.builder import RecordingBuilder, Tally, open_builder
from tuner.backends import candidates
from tuner.backends.cublaslt.algorithms import kernel_for
from tuner.devices import open_device
from tuner.devices.base import Device
from tuner.errors import LeaseLost, NoLegalCandidate, NotRecorded, StoreError
from tuner.jobs import LeasedJob, Worker
from tuner.jobs.stages import Stage, StagedQueue, hand_to_gpus
from tuner.search.ahead import first_kernels
from tuner.search.budget import BUDGETS
from tuner.search.cost_model import AnalyticModel
from tuner.search.packs import in_batches
from tuner.store import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetGpu:
    """A kind of GPU in the fleet: what it is called, and its model."""

    name: str
    model: DeviceModel

    @property
    def names(self) -> tuple[str, str]:
        """What jobs may call it."""
        return (self.model.slug, self.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileOrder:
    """What a compile task is given.

    Attributes:
        environ: the settings, as environment variables.
        owner: the name that its leases have.
        devices: what the jobs are to be measured on.
        cores: compilers at once.
        share: URL of the packs that the fleet shares; empty where all mount one folder.
    """

    environ: Mapping[str, str]
    owner: str
    devices: Sequence[FleetGpu]
    cores: int
    share: str = ""
    ttl_s: float = 60.0


def compile_jobs(order: CompileOrder) -> int:
    """Compile for one job after the other until none waits for it; how many there were.

    Raises:
        CompilerNotFound: no nvcc on this machine. No job was touched.
        StoreError, SettingsError: the database or the keys cannot be used.
    """
    settings = Settings.load(order.environ)
    logging.configure(json=settings.log_json)
    with Store.open(settings.database, signer=identity.signer(settings)) as store:
        queue = StagedQueue(store, Stage.COMPILE)
        share = Share(order.share, identity.trusted_packs(settings)) if order.share else None
        preparation = Preparation(
            settings=settings,
            store=store,
            queue=queue,
            builder=open_builder(settings, store, order.cores),
            devices=order.devices,
            share=share,
        )
        worker = Worker(
            queue,
            preparation,
            devices=[name for device in order.devices for name in device.names],
            owner=order.owner,
            ttl_s=order.ttl_s,
        )
        return worker.run(until_idle=True)


class Preparation:
    """Compiles for one job after the other; what `tuner.jobs.Worker` calls."""

    def __init__(
        self,
        *,
        settings: Settings,
        store: Store,
        queue: StagedQueue,
        builder: RecordingBuilder,
        devices: Sequence[FleetGpu],
        share: Share | None,
    ) -> None:
        self._settings = settings
        self._store = store
        self._queue = queue
        self._builder = builder
        self._devices = devices
        self._share = share
        self._ranker = AnalyticModel()
        self._recorded: dict[str, Device] = {}

    def __call__(self, leased: LeasedJob) -> None:
        """Compile what the job's run begins with, or has asked for; hand it to the GPUs."""
        store = self._builder.records = self._store.fenced(leased.fence)
        kernels, failures = self._wanted(leased, store)
        packs = {}
        say = _reporter(leased, len(kernels))
        with closing(in_batches(self._builder, kernels, leased.should_stop)) as batches:
            for batch in batches:
                for built in batch:
                    if built.pack is not None:
                        packs[built.pack.hash] = built.pack
                    elif built.failure is not None:
                        failures[built.kernel.name] = built.failure.message
                say(len(batch))
        if self._share is not None:
            self._share.push(self._builder.store, packs.values())
        self._report_built(leased)
        hand_to_gpus(leased, list(packs), failures)

    def _wanted(self, leased: LeasedJob, store: Store) -> tuple[list[AnyKernel], dict[str, str]]:
        """Kernels to build; and of those asked for that nobody knows, why they are not."""
        job = leased.job
        device, found = self._found(job.problem, job.device, leased)
        wanted = self._queue.notes(job.id).wanted
        if not wanted:
            first = first_kernels(
                job.problem,
                found,
                device.model,
                store=store,
                builder=self._builder,
                ranker=self._ranker,
                effort=job.effort,
            )
            return first, {}
        known = {candidate.kernel.name: candidate.kernel for candidate in found}
        library: AnyKernel | None = kernel_for(job.problem, device.model.arch)
        if library is not None:
            known[library.name] = library
        unknown = {
            name: "the compilers know no such kernel" for name in wanted if name not in known
        }
        return [known[name] for name in wanted if name in known], unknown

    def _found(
        self, problem: Problem, wanted: str, leased: LeasedJob
    ) -> tuple[FleetGpu, list[Candidate]]:
        """The device that the job is for, and what its run chooses from.

        Raises:
            NotRecorded: it is for recorded devices, and none holds the problem.
        """
        refusal: NotRecorded | None = None
        for device in self._devices:
            if wanted not in ("", *device.names):
                continue
            if not device.name.startswith("replay:"):
                with suppress(NoLegalCandidate):  # then the default is all there is
                    level = BUDGETS[leased.job.effort].level
                    return device, candidates(problem, device.model, level=level)
                return device, []
            try:
                recorded = self._open(device.name).recorded(problem)
            except NotRecorded as error:
                refusal = error
                continue
            return device, list(recorded or ())
        raise refusal or NotRecorded(f"no GPU of this fleet is called {wanted!r}")

    def _open(self, name: str) -> Device:
        """A recorded device; loading one takes a while."""
        if name not in self._recorded:
            self._recorded[name] = open_device(name, sweeps=self._settings.sweeps)
        return self._recorded[name]

    def _report_built(self, leased: LeasedJob) -> None:
        tally, self._builder.tally = self._builder.tally, Tally()
        if tally != Tally():
            with suppress(LeaseLost, StoreError):  # these figures are not worth an attempt
                leased.event("built", asdict(tally))


def _reporter(leased: LeasedJob, total: int) -> Callable[[int], None]:
    """Passes on how many kernels are built."""
    done = 0

    def say(more: int) -> None:
        nonlocal done
        done += more
        job = leased.job
        leased.progress("compile", done, total, job.best_us, job.best)

    return say
