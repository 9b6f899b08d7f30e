"""Places a fleet's workers on the machines that Ray knows, and looks after them.

Every `LOOK_S` it compares what there is with what there should be: one worker a GPU, compile tasks
while jobs wait for kernels. It knows nothing that it could lose: GPUs' workers have names in Ray,
go on when the driver dies, and are found by the next one, unless that has other settings. Jobs of a
worker that Ray knows to be dead are free at once.
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
"""How often machines, workers and the queue are looked at: a change takes effect within 5 s."""
_STARTS_WITHIN_S = 120.0
"""Silence of a worker that has yet to answer: its process imports its libraries."""
_SILENT_S = 20.0
"""Silence after which a worker is killed."""
NAMESPACE = "gemmsmith-fleet"
"""Of the workers' names in Ray."""
_REST_S = 10.0
"""Pause before a GPU whose worker could not work gets another one."""


class OneMachineOnly(TunerError):
    """The database is a file, and the cluster has several machines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How a fleet is run.

    Attributes:
        cores: cores of one compile task; 0: GPUs' workers compile for themselves.
        share: URL where packs are shared; empty: all machines mount one packs folder.
        ttl_s: how long a lease lasts without a sign of life.
        gpu_worker, compile_jobs: what is run on the machines.
    """

    cores: int = 4
    share: str = ""
    ttl_s: float = 60.0
    poll_s: float = 1.0
    gpu_worker: type[GpuWorker] = GpuWorker
    compile_jobs: Callable[[CompileOrder], int] = compile_jobs


@dataclass(kw_only=True, slots=True)
class _Hired:
    """A GPU's worker and what is known of it; an `owner` once it has said so."""

    actor: Any
    heard_at: float
    patience_s: float = _STARTS_WITHIN_S
    asked: Any = None
    beat: Beat | None = None

    @property
    def owner(self) -> str:
        return self.beat.owner if self.beat is not None else ""


@dataclass(kw_only=True)
class Driver:
    """Looks after the workers of one cluster. `ray.init` was called before."""

    settings: Settings
    queue: StagedQueue
    options: Options
    hired: dict[Slot, _Hired] = field(default_factory=dict)
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
        # Workers with these settings, of this version, are as good as new ones.
        told = f"{VERSION} {sorted(self._order.environ.items())} {replace(self._order, environ={})}"
        self._kind = hashlib.sha256(told.encode()).hexdigest()[:12]

    def dismiss_others(self) -> None:
        """End workers that an earlier driver left, with other settings."""
        for found in ray.util.list_named_actors(all_namespaces=True):
            if found["namespace"] == NAMESPACE and not found["name"].startswith(f"{self._kind}:"):
                with suppress(ValueError):  # it has just ended
                    ray.kill(ray.get_actor(found["name"], namespace=NAMESPACE))

    def look(self) -> None:
        """Bring the workers into line with machines and queue.

        Raises:
            StoreError: the database is away; workers go on, and the next look catches up.
            OneMachineOnly: other machines do not reach the database.
        """
        machines = _machines()
        on_disk = self.settings.database.startswith("sqlite")
        if on_disk and len({machine.address for machine in machines}) > 1:
            raise OneMachineOnly(
                "SQLite is for one machine, and the cluster has more: set GEMMSMITH_DATABASE to a "
                "PostgreSQL URL on all of them"
            )
        wanted = slots(machines)
        self._hear()
        for slot in self.hired.keys() - set(wanted):
            self._dismiss(slot, "its machine has gone")
        now = time.monotonic()
        self.resting = {slot: until for slot, until in self.resting.items() if until > now}
        for slot in to_start(wanted, self.hired, self.resting):
            self._hire(slot)
        self._collect_compilers()
        if self.lapsing:
            freed = self.queue.lapse(sorted(self.lapsing))
            self.lapsing.clear()
            if freed:
                log.info("leases_ended", jobs=freed)
        self._compile(machines)

    def devices(self) -> list[FleetGpu]:
        """The kinds of GPU whose jobs are compiled by tasks."""
        beats = [hired.beat for hired in self.hired.values() if hired.beat is not None]
        kinds = {
            beat.device.name + beat.device.model.slug: beat.device
            for beat in beats
            if beat.device is not None and beat.staged
        }
        return [kinds[name] for name in sorted(kinds)]

    def ready(self) -> int:
        """How many GPUs have a worker that works."""
        beats = (hired.beat for hired in self.hired.values())
        return sum(beat is not None and beat.device is not None for beat in beats)

    def stop(self) -> None:
        """Have all jobs handed back, and end the workers."""
        stops = [hired.actor.stop.remote() for hired in self.hired.values()]
        if stops:
            ray.wait(stops, num_returns=len(stops), timeout=self.settings.stop_timeout_s)
        for task in self.compiling:
            ray.cancel(task, force=True)
        for slot in list(self.hired):
            self._dismiss(slot, "the fleet ends")
        self.lapsing.update(self.compiling.values())
        self.queue.lapse(sorted(self.lapsing))

    def _hire(self, slot: Slot) -> None:
        order = replace(self._order, owner=self._owner(slot.resource), device=slot.device)
        gpus = slot.needs.get("GPU", 0)
        actor = (
            ray.remote(self.options.gpu_worker)
            .options(
                num_cpus=0,
                num_gpus=gpus,
                resources={} if gpus else slot.needs,
                max_concurrency=4,
                name=f"{self._kind}:{slot.machine}:{slot.resource}:{slot.number}",
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                scheduling_strategy=NodeAffinitySchedulingStrategy(slot.machine, soft=False),
            )
            .remote(order)
        )
        self.hired[slot] = _Hired(actor=actor, heard_at=time.monotonic())
        log.info("gpu_hired", device=slot.device, machine=slot.machine[:8])

    def _hear(self) -> None:
        """Ask every worker how it is, and hear those that have answered."""
        for hired in self.hired.values():
            if hired.asked is None:
                hired.asked = hired.actor.beat.remote()
        asked = {hired.asked: slot for slot, hired in self.hired.items()}
        if not asked:
            return
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=LOOK_S / 2)
        now = time.monotonic()
        for answer in answered:
            slot = asked[answer]
            hired = self.hired[slot]
            hired.asked = None
            try:
                hired.beat = ray.get(answer)
            except RayError as error:
                self._dismiss(slot, f"{type(error).__name__}: it died")
                continue
            hired.heard_at, hired.patience_s = now, _SILENT_S
            if hired.beat.error:
                self._dismiss(slot, hired.beat.error)
                self.resting[slot] = now + _REST_S
        for slot, hired in list(self.hired.items()):
            if now - hired.heard_at > hired.patience_s:
                self._dismiss(slot, "it does not answer")

    def _dismiss(self, slot: Slot, reason: str) -> None:
        hired = self.hired.pop(slot)
        log.info("gpu_dismissed", device=slot.device, machine=slot.machine[:8], reason=reason)
        ray.kill(hired.actor)
        if hired.owner:
            self.lapsing.add(hired.owner)

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

    def _owner(self, what: str) -> str:
        return f"fleet-{self.name}:{what}:{uuid.uuid4().hex[:12]}"


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
