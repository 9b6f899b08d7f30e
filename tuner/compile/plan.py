"""How kernels are divided into units, and how many units are compiled at once.

A unit costs one run of the C++ front end over CUTLASS, and some time for every kernel. A kernel
that differs from another only in its cluster or stages takes a fraction of the time of a new
variety (tile, schedules). So a unit holds few varieties, and there is about one unit per worker.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from gemmsmith.core.kernel import AnyKernel
from tuner.backends import variety
from tuner.errors import CompileFailed

Family = tuple[str, tuple[object, ...]]
"""A family and a variety of it: such kernels share most of their time in one unit."""

JOBS_VARIABLE = "GEMMSMITH_COMPILE_JOBS"
"""Environment variable that overrides how many units compile at once."""

LARGEST_UNIT = 16
"""The most kernels in a unit: if one does not compile, all others are compiled a second time."""

MOST_VARIETIES = 5
"""The most varieties in a unit, because of memory (see `MEMORY_PER_UNIT`)."""

MEMORY_PER_UNIT = int(7.5 * 2**30)
"""Bytes that nvcc's largest process needs for a unit of `MOST_VARIETIES`: 3.4 GB for one variety
with any number of clusters, 5.2 to 6.6 GB for four (nvcc 13.0.88, bf16, 2026-11-21)."""

BASE_COST, VARIETY_COST, KERNEL_COST = 24.0, 14.0, 3.0
"""Seconds for a unit, for each variety in it and for each further kernel: 39 s for one kernel, 46 s
for four clusters of one variety, 80 s for four tiles and 92 s for eight kernels of four varieties
(nvcc 13.0.88, a slow core, 2026-11-21). Only their proportions matter."""


def workers(jobs: int | None = None) -> int:
    """Units to compile at once: `jobs`, else `GEMMSMITH_COMPILE_JOBS`, else by cores and memory.

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
    return max(1, min(_cores(), _available_memory() // MEMORY_PER_UNIT))


def units(kernels: Sequence[AnyKernel], parallel: int) -> list[list[AnyKernel]]:
    """Split kernels into units, in the order to compile them.

    A unit holds kernels of one family, with kernels of the same variety together. There are as many
    units as workers, or about a multiple if the units would be too large. The unit with the first
    kernel of the list is compiled first.
    """
    rank = {kernel.name: position for position, kernel in enumerate(kernels)}
    families: dict[str, list[AnyKernel]] = {}
    for kernel in kernels:
        families.setdefault(kernel.family, []).append(kernel)
    split = _split(families, parallel)
    if len(split) > parallel:  # split again, so that no worker is idle in the last round
        split = _split(families, parallel * -(-len(split) // parallel))
    for unit in split:
        unit.sort(key=lambda kernel: rank[kernel.name])
    return sorted(split, key=lambda unit: rank[unit[0].name])


def _split(families: Mapping[str, list[AnyKernel]], number: int) -> list[list[AnyKernel]]:
    """About `number` units, divided among the families by their share of the cost."""
    total = sum(map(cost, families.values()))
    return [
        unit
        for family in families.values()
        for unit in _pack(family, max(1, int(number * cost(family) / total)))
    ]


def cost(unit: Sequence[AnyKernel]) -> float:
    """Seconds to compile a unit on the machine of the constants."""
    varieties = len(_varieties(unit))
    return BASE_COST + VARIETY_COST * varieties + KERNEL_COST * (len(unit) - varieties)


def share(*, known: bool) -> float:
    """Seconds that a kernel adds; `known` if one `alike` is compiled with it.

    Else it bears its part of a unit's fixed cost.
    """
    return KERNEL_COST if known else VARIETY_COST + BASE_COST / MOST_VARIETIES


def alike(kernel: AnyKernel) -> Family:
    """Equal for kernels of one family and variety."""
    return kernel.family, variety(kernel)


def _varieties(kernels: Sequence[AnyKernel]) -> dict[tuple[object, ...], list[AnyKernel]]:
    """Kernels by variety: all that their templates depend on except clusters and stages."""
    groups: dict[tuple[object, ...], list[AnyKernel]] = {}
    for kernel in kernels:
        groups.setdefault(variety(kernel), []).append(kernel)
    return groups


def _pack(family: list[AnyKernel], parallel: int) -> list[list[AnyKernel]]:
    """Divide a family into at least `parallel` units of about equal cost, if there are enough."""
    # Greedy: the largest group of kernels of one variety goes first, always into the cheapest unit
    # that has room for it.
    groups = [
        piece for group in _varieties(family).values() for piece in _pieces(group, LARGEST_UNIT)
    ]
    # Fewer groups than workers: divide the largest until every worker has a group.
    while len(groups) < parallel and len(largest := max(groups, key=len)) > 1:
        groups.remove(largest)
        groups += _pieces(largest, len(largest) - 1)
    # One unit per worker, but more if a limit of varieties or kernels would be exceeded.
    number = max(
        min(parallel, len(groups)),
        -(-len(groups) // MOST_VARIETIES),
        -(-len(family) // LARGEST_UNIT),
    )
    packed: list[list[AnyKernel]] = [[] for _ in range(number)]
    for group in sorted(groups, key=len, reverse=True):
        roomy = [unit for unit in packed if _has_room(unit, group)]
        if not roomy:
            packed.append(list(group))
        else:
            min(roomy, key=cost).extend(group)
    return [unit for unit in packed if unit]


def _has_room(unit: list[AnyKernel], group: list[AnyKernel]) -> bool:
    together = [*unit, *group]
    return len(together) <= LARGEST_UNIT and len(_varieties(together)) <= MOST_VARIETIES


def _pieces(kernels: list[AnyKernel], size: int) -> list[list[AnyKernel]]:
    number = -(-len(kernels) // size)
    bounds = [len(kernels) * i // number for i in range(number + 1)]
    return [kernels[start:end] for start, end in itertools.pairwise(bounds)]


def _cores() -> int:
    """Cores that this process may use, by its affinity and its container's quota."""
    cores = len(os.sched_getaffinity(0))
    quota = _control_group("cpu.max").split()
    if len(quota) == 2 and quota[0].isdecimal() and quota[1].isdecimal():
        cores = min(cores, max(1, int(quota[0]) // max(1, int(quota[1]))))
    return cores


def _available_memory() -> int:
    """Bytes of memory that this machine and its container's limit still allow."""
    meminfo = Path("/proc/meminfo").read_text(encoding="ascii")
    match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    available = int(match[1]) * 1024 if match else MEMORY_PER_UNIT
    limit, used = _control_group("memory.max"), _control_group("memory.current")
    if limit.isdecimal() and used.isdecimal():
        available = min(available, int(limit) - int(used))
    return max(0, available)


def _control_group(name: str) -> str:
    try:
        return (Path("/sys/fs/cgroup") / name).read_text(encoding="ascii").strip()
    except OSError:
        return ""
