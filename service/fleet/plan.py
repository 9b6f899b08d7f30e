"""What a fleet should run, by what its machines have. Pure: the driver does what this says."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

RECORDED = "replay:"
"""Resources of that name are recorded GPUs, so many of them on a machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A node that Ray says is alive.

    Attributes:
        resources: what it has of each, whether in use or not.
    """

    id: str
    address: str = field(default="", compare=False)
    resources: Mapping[str, float] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Slot:
    """Room for one GPU's worker: the `number`th of a resource on a machine."""

    machine: str
    resource: str
    number: int

    @property
    def device(self) -> str:
        """What the worker opens. Ray shows an actor its own GPU alone, so that is the first."""
        return "cuda:0" if self.resource == "GPU" else self.resource

    @property
    def needs(self) -> dict[str, float]:
        """What Ray is asked for."""
        return {self.resource: 1.0}


def slots(machines: Iterable[Machine]) -> list[Slot]:
    """One for each GPU, real or recorded, of all machines; in a fixed order."""
    return sorted(
        Slot(machine=machine.id, resource=name, number=number)
        for machine in machines
        for name, amount in machine.resources.items()
        if name == "GPU" or name.startswith(RECORDED)
        for number in range(int(amount))
    )


def to_start(
    wanted: Iterable[Slot], running: Collection[Slot], resting: Collection[Slot]
) -> list[Slot]:
    """Where a worker is missing; not where one has just failed, and rests."""
    return [slot for slot in wanted if slot not in running and slot not in resting]


def compile_tasks(machines: Iterable[Machine], *, cores: int, due: int, running: int) -> int:
    """How many compile tasks to start: one for each job that waits, as far as cores reach.

    Args:
        machines: their `CPU` counts.
        cores: of one task.
        due: jobs that wait to be compiled for.
        running: tasks there are; each goes on to the next job by itself.
    """
    room = sum(int(machine.resources.get("CPU", 0)) // cores for machine in machines)
    return max(0, min(due, room - running))
