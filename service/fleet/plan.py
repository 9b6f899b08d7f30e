"""Decides what a fleet should run on its machines. Pure functions; the driver acts on them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

RECORDED = "replay:"
"""A machine's resources whose names begin with this are recorded GPUs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A node that Ray reports alive.

    Attributes:
        resources: amounts by name, whether in use or not.
    """

    id: str
    address: str = field(default="", compare=False)
    resources: Mapping[str, float] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Slot:
    """A place for a GPU's worker: the `number`th of a resource on a machine."""

    machine: str
    resource: str
    number: int

    @property
    def device(self) -> str:
        """The device that the worker opens. Ray shows an actor only its own GPU, as `cuda:0`."""
        return "cuda:0" if self.resource == "GPU" else self.resource


def slots(machines: Iterable[Machine]) -> list[Slot]:
    """Return a slot for each GPU, real or recorded, of all machines, in a fixed order."""
    return sorted(
        Slot(machine=machine.id, resource=name, number=number)
        for machine in machines
        for name, amount in machine.resources.items()
        if name == "GPU" or name.startswith(RECORDED)
        for number in range(int(amount))
    )


def to_start(
    gpus: Iterable[Slot], running: Collection[Slot], resting: Collection[Slot]
) -> list[Slot]:
    """Return the slots without a worker, except those that rest after a failure."""
    return [slot for slot in gpus if slot not in running and slot not in resting]


def compile_tasks(machines: Iterable[Machine], *, cores: int, due: int, running: int) -> int:
    """Return how many compile tasks to start: one for each waiting job, if there are cores.

    Args:
        machines: the machines; their `CPU` resource counts.
        cores: cores of a task.
        due: number of jobs that wait for kernels.
        running: number of tasks that run; a task takes the next job by itself.
    """
    room = sum(int(machine.resources.get("CPU", 0)) // cores for machine in machines)
    return max(0, min(due, room - running))
