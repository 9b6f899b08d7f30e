"""How kernels are put together into units, and how many units may run at once.

A unit pays the C++ front end for CUTLASS once, and then for every kernel in it; kernels that share
a tile share much of that too. So units hold kernels that are alike, few enough that every worker
has one.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path

from gemmsmith.kernel import Kernel
from tuner.errors import CompileFailed

JOBS_VARIABLE = "GEMMSMITH_COMPILE_JOBS"
"""Environment variable that overrides how many units compile at once."""

LARGEST_UNIT = 16
"""Kernels per unit at most: beyond, memory grows past what one core's share of a machine holds,
and one kernel that does not compile costs too many others a second attempt."""

MEMORY_PER_UNIT = int(4.5 * 2**30)
"""Bytes that nvcc needs for a unit, the largest of its processes."""


def workers(jobs: int | None = None, memory_per_unit: int = MEMORY_PER_UNIT) -> int:
    """Units to compile at once: `jobs`, else `GEMMSMITH_COMPILE_JOBS`, else what fits.

    Raises:
        CompileFailed: the variable is not a positive integer.
    """
    if jobs is not None:
        return max(1, jobs)
    setting = os.environ.get(JOBS_VARIABLE, "").strip()
    if setting:
        if not setting.isdecimal() or int(setting) < 1:
            raise CompileFailed(f"{JOBS_VARIABLE} must be a positive integer, got {setting!r}")
        return int(setting)
    return max(1, min(_cores(), _available_memory() // memory_per_unit))


def units(kernels: Sequence[Kernel], parallel: int) -> list[list[Kernel]]:
    """Split kernels into units, in the order to compile them.

    A unit holds kernels of one family. The units are as many as there are workers, or a multiple
    of that when they would grow beyond `LARGEST_UNIT`; the unit with the kernel that came first
    is compiled first.
    """
    if not kernels:
        return []
    families: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        families.setdefault(kernel.family, []).append(kernel)
    size = _unit_size([len(family) for family in families.values()], parallel)
    rank = {kernel.name: position for position, kernel in enumerate(kernels)}
    split = [
        chunk
        for family in families.values()
        for chunk in _chunks(sorted(family, key=_likeness), size)
    ]
    return sorted(split, key=lambda unit: min(rank[kernel.name] for kernel in unit))


def _likeness(kernel: Kernel) -> tuple[object, ...]:
    """Kernels next to each other in this order share the most template instantiations."""
    return (
        kernel.epilogue,
        kernel.swapped,
        kernel.fast_accumulation,
        kernel.tile,
        kernel.mainloop,
        kernel.scheduler,
        kernel.cluster,
        kernel.stages,
        kernel.name,
    )


def _unit_size(counts: list[int], parallel: int) -> int:
    waves = 1
    while True:
        slots = max(waves * parallel, len(counts))
        size = next(
            size
            for size in range(1, max(counts) + 1)
            if sum(-(-count // size) for count in counts) <= slots
        )
        if size <= LARGEST_UNIT:
            return size
        waves += 1


def _chunks(kernels: list[Kernel], size: int) -> list[list[Kernel]]:
    """Consecutive chunks of at most `size`, evenly filled."""
    number = -(-len(kernels) // size)
    bounds = [len(kernels) * i // number for i in range(number + 1)]
    return [kernels[a:b] for a, b in itertools.pairwise(bounds)]


def _cores() -> int:
    """Cores this process may use: its affinity, and a container's quota."""
    cores = len(os.sched_getaffinity(0))
    quota = _control_group("cpu.max").split()
    if len(quota) == 2 and quota[0].isdecimal() and quota[1].isdecimal():
        cores = min(cores, max(1, int(quota[0]) // max(1, int(quota[1]))))
    return cores


def _available_memory() -> int:
    """Bytes that can still be allocated: the machine's, and a container's limit."""
    meminfo = Path("/proc/meminfo").read_text(encoding="ascii")
    found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    available = int(found[1]) * 1024 if found else MEMORY_PER_UNIT
    limit, used = _control_group("memory.max"), _control_group("memory.current")
    if limit.isdecimal() and used.isdecimal():
        available = min(available, int(limit) - int(used))
    return max(0, available)


def _control_group(name: str) -> str:
    try:
        return (Path("/sys/fs/cgroup") / name).read_text(encoding="ascii").strip()
    except OSError:
        return ""
