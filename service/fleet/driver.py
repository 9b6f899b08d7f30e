"""Places a fleet's workers on the machines of a Ray cluster, and restarts them.

Every `LOOK_S` it compares what runs with what should run: one worker for each GPU, and compile
tasks while jobs wait for kernels. The driver has no state of its own to lose: workers of GPUs have
names in Ray and go on if the driver dies. The next driver takes them over, if it has the same
settings. The jobs of a worker that Ray reports dead are free at once.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import ray
import structlog
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from gemmsmith.version import VERSION
from service.fleet.compiling import CompileOrder, FleetGpu, compile_jobs
from service.fleet.measuring import Beat, GpuWorker, MeasureOrder
from service.fleet.plan import Machine, Slot, compile_tasks, slots, to_start
from service.settings import Settings
from tuner.errors import TunerError
from tuner.jobs.stages import StagedQueue

log = structlog.get_logger("gemmsmith.fleet")

LOOK_S = 1.0
"""How often the driver looks at machines, workers and queue: changes take effect within 5 s."""
_STARTS_WITHIN_S = 120.0
"""Silence before its first answer after which a worker is killed: it imports its libraries."""
_SILENT_S = 20.0
"""Silence after which a worker that has answered is killed."""
NAMESPACE = "gemmsmith-fleet"
"""Ray's namespace of the workers' names."""
_REST_S = 10.0
"""Pause before a GPU whose worker could not work gets another one."""


class OneMachineOnly(TunerError):
    """The database is a file, and the cluster has several machines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How a fleet is run.

    Attributes:
        cores: cores of a compile task; 0 if the workers of GPUs compile for themselves.
        share: URL of the packs that the fleet shares; empty if all machines mount one folder.
        ttl_s: how long a lease lasts without a heartbeat.
        poll_s: how often a worker without a job looks for one.
        gpu_worker, compile_jobs: the actor and the task that run on the machines.
    """

    cores: int = 4
    share: str = ""
    ttl_s: float = 60.0
    poll_s: float = 1.0
    gpu_worker: type[GpuWorker] = GpuWorker
    compile_jobs: Callable[[CompileOrder], int] = compile_jobs


@dataclass(kw_only=True, slots=True)
class _GpuActor:
    """A GPU's worker.

    Attributes:
        heard_at: when it answered last, or was started.
        patience_s: silence after which it is killed.
        request: the pending call of `beat`, if any.
        beat: its last answer.
    """

    actor: Any
    heard_at: float
    patience_s: float = _STARTS_WITHIN_S
    request: Any = None
    beat: Beat | None = None

    @property
    def owner(self) -> str:
        return self.beat.owner if self.beat is not None else ""


@dataclass(kw_only=True)
class Driver:
    """Starts, watches and ends the workers of a cluster, to which `ray.init` has connected.

    Attributes:
        workers: the GPUs' workers.
        resting: GPUs whose worker could not work, and until when they get no other one.
        compiling: the compile tasks that run, and the owners of their leases.
        lapsing: owners of leases that end, because their worker or task is dead.
    """

    settings: Settings
    queue: StagedQueue
    options: Options
    workers: dict[Slot, _GpuActor] = field(default_factory=dict)
    resting: dict[Slot, float] = field(default_factory=dict)
    compiling: dict[Any, str] = field(default_factory=dict)
    lapsing: set[str] = field(default_factory=set)
    name: str = field(default_factory=lambda: uuid.uuid4().hex[:8])

    def __post_init__(self) -> None:
        self._order = MeasureOrder(
            environ=self.settings.environment(),
            owner="",
            device="",
            compilers=self.options.cores > 0,
            share=self.options.share,
            ttl_s=self.options.ttl_s,
            poll_s=self.options.poll_s,
        )
        # Workers of the same version with the same settings have the same kind and are kept.
        kind = f"{VERSION} {sorted(self._order.environ.items())} {replace(self._order, environ={})}"
        self._kind = hashlib.sha256(kind.encode()).hexdigest()[:12]

    def end_others(self) -> None:
        """End workers that an earlier driver started with other settings."""
        for actor in ray.util.list_named_actors(all_namespaces=True):
            if actor["namespace"] == NAMESPACE and not actor["name"].startswith(f"{self._kind}:"):
                with suppress(ValueError):  # it has just ended
                    ray.kill(ray.get_actor(actor["name"], namespace=NAMESPACE))

    def look(self) -> None:
        """Start and end workers and compile tasks, as the machines and the queue need.

        Raises:
            StoreError: the database cannot be reached. Workers go on; call this again later.
            OneMachineOnly: other machines do not reach the database.
        """
        machines = _machines()
        on_disk = self.settings.database.startswith("sqlite")
        if on_disk and len({machine.address for machine in machines}) > 1:
            raise OneMachineOnly(
                "SQLite is for one machine, and the cluster has more: set GEMMSMITH_DATABASE to a "
                "PostgreSQL URL on all of them"
            )
        gpus = slots(machines)
        self._hear()
        for slot in self.workers.keys() - set(gpus):
            self._end(slot, "its machine has gone")
        now = time.monotonic()
        self.resting = {slot: until for slot, until in self.resting.items() if until > now}
        for slot in to_start(gpus, self.workers, self.resting):
            self._start(slot)
        self._collect_compilers()
        # Before `_compile`, so that jobs of dead compile tasks count as due.
        if self.lapsing:
            freed = self.queue.lapse(sorted(self.lapsing))
            self.lapsing.clear()
            if freed:
                log.info("leases_ended", jobs=freed)
        self._compile(machines)

    def devices(self) -> list[FleetGpu]:
        """Return the kinds of GPU whose jobs the compile tasks compile for."""
        beats = [worker.beat for worker in self.workers.values() if worker.beat is not None]
        kinds = {
            beat.device.name + beat.device.model.slug: beat.device
            for beat in beats
            if beat.device is not None and beat.staged
        }
        return [kinds[name] for name in sorted(kinds)]

    def ready(self) -> int:
        beats = (worker.beat for worker in self.workers.values())
        return sum(beat is not None and beat.device is not None for beat in beats)

    def stop(self) -> None:
        """Let the workers hand back their jobs, and end them."""
        stops = [worker.actor.stop.remote() for worker in self.workers.values()]
        if stops:
            ray.wait(stops, num_returns=len(stops), timeout=self.settings.stop_timeout_s)
        for task in self.compiling:
            ray.cancel(task, force=True)
        for slot in list(self.workers):
            self._end(slot, "the fleet ends")
        self.lapsing.update(self.compiling.values())
        self.queue.lapse(sorted(self.lapsing))

    def _start(self, slot: Slot) -> None:
        order = replace(self._order, owner=self._owner(slot.resource), device=slot.device)
        real = slot.resource == "GPU"
        actor = (
            ray.remote(self.options.gpu_worker)
            .options(
                num_cpus=0,  # measuring needs little; all cores are for compile tasks
                num_gpus=int(real),
                resources={} if real else {slot.resource: 1.0},
                max_concurrency=4,
                name=f"{self._kind}:{slot.machine}:{slot.resource}:{slot.number}",
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                scheduling_strategy=NodeAffinitySchedulingStrategy(slot.machine, soft=False),
            )
            .remote(order)
        )
        self.workers[slot] = _GpuActor(actor=actor, heard_at=time.monotonic())
        log.info("gpu_hired", device=slot.device, machine=slot.machine[:8])

    def _hear(self) -> None:
        """Call `beat` of every worker, read the answers, and end dead and silent workers."""
        for worker in self.workers.values():
            if worker.request is None:
                worker.request = worker.actor.beat.remote()
        requests = {worker.request: slot for slot, worker in self.workers.items()}
        if not requests:
            return
        # Waiting half a look leaves time for the rest; a late answer is read at the next look.
        answered, _ = ray.wait(list(requests), num_returns=len(requests), timeout=LOOK_S / 2)
        now = time.monotonic()
        for request in answered:
            slot = requests[request]
            worker = self.workers[slot]
            worker.request = None
            try:
                worker.beat = ray.get(request)
            except RayError as error:
                self._end(slot, f"{type(error).__name__}: it died")
                continue
            worker.heard_at, worker.patience_s = now, _SILENT_S
            if worker.beat.error:
                self._end(slot, worker.beat.error)
                self.resting[slot] = now + _REST_S
        for slot, worker in list(self.workers.items()):
            if now - worker.heard_at > worker.patience_s:
                self._end(slot, "it does not answer")

    def _end(self, slot: Slot, reason: str) -> None:
        worker = self.workers.pop(slot)
        log.info("gpu_dismissed", device=slot.device, machine=slot.machine[:8], reason=reason)
        ray.kill(worker.actor)
        if worker.owner:
            self.lapsing.add(worker.owner)

    def _collect_compilers(self) -> None:
        if not self.compiling:
            return
        ended, _ = ray.wait(list(self.compiling), num_returns=len(self.compiling), timeout=0)
        for task in ended:
            owner = self.compiling.pop(task)
            try:
                ray.get(task)
            except RayError as error:
                log.warning("compile_task_failed", owner=owner, error=str(error)[-500:])
                self.lapsing.add(owner)

    def _compile(self, machines: Sequence[Machine]) -> None:
        devices, cores = self.devices(), self.options.cores
        if not devices or cores < 1:
            return
        due = self.queue.due([name for device in devices for name in device.names])
        running = len(self.compiling)
        run = ray.remote(num_cpus=cores, max_retries=0, scheduling_strategy="SPREAD")
        for _ in range(compile_tasks(machines, cores=cores, due=due, running=running)):
            owner = self._owner("compile")
            order = CompileOrder(
                environ=self.settings.environment(),
                owner=owner,
                devices=devices,
                cores=cores,
                share=self.options.share,
                ttl_s=self.options.ttl_s,
            )
            self.compiling[run(self.options.compile_jobs).remote(order)] = owner

    def _owner(self, resource: str) -> str:
        return f"fleet-{self.name}:{resource}:{uuid.uuid4().hex[:12]}"


def _machines() -> list[Machine]:
    return [
        Machine(
            id=node["NodeID"],
            address=node["NodeManagerAddress"],
            resources=node["Resources"],
        )
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"]
    ]
