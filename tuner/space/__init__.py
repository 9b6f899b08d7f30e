"""Which kernels and launches are legal for a problem, per architecture.

Kernels come in families, by what their copies need of a problem's rows: TMA (16 bytes everywhere),
TMA with stores from registers (D unaligned), and for rows that TMA cannot read TMA after a copy,
cp.async (4 bytes) or multistage (anything). A problem is offered the first family it qualifies
for: the later ones compute the same, slower. To the curated kernels come those whose tiles fit
the problem's own extents (`fitted`).

Invariants: the order is deterministic, every kernel passes `legality.refusal`, no two kernels
share a name, and the list is never empty: `NoLegalCandidate` is raised instead.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from functools import lru_cache
from math import gcd

from gemmsmith.candidate import Candidate
from gemmsmith.device import DeviceModel
from gemmsmith.kernel import TMA_MAINLOOPS, CutlassKernel, EpilogueSchedule
from gemmsmith.problem import Problem
from tuner.errors import NoLegalCandidate
from tuner.space import core, fitted, full
from tuner.space.launches import launches, splits_refusal
from tuner.space.legality import (
    CPASYNC_MIN_BYTES,
    MAX_CLUSTER_SIDE,
    MAX_GRID_YZ,
    PROBLEM_RULES,
    TMA_BYTES,
    refusal,
)
from tuner.space.operation import gemm_operation

__all__ = [
    "Level",
    "candidates",
    "gemm_operation",
    "kernels",
    "launches",
    "offered",
    "refusal",
    "splits_refusal",
]

ARCHITECTURES = ("sm90",)


class Level(StrEnum):
    """How much of the space to look at."""

    CORE = "core"  # the curated list and what fits the problem: where winners have been found
    FULL = "full"  # every legal kernel, thousands


def kernels(
    problem: Problem, arch: str = "sm90", *, level: Level = Level.CORE
) -> list[CutlassKernel]:
    """The legal kernels for a problem.

    Raises:
        NoLegalCandidate: unknown architecture, or a grid that no kernel can launch.
    """
    if arch not in ARCHITECTURES:
        raise NoLegalCandidate(
            f"no kernels for architecture {arch!r}: choose one of {', '.join(ARCHITECTURES)}"
        )
    if legal := _legal(_like(problem), level):
        return list(legal)
    raise NoLegalCandidate(
        f"no kernel can launch {problem}: its output has more tiles than a 32-bit count holds; "
        "compute it in parts"
    )


def candidates(
    problem: Problem, device: DeviceModel, *, level: Level = Level.CORE
) -> list[Candidate]:
    """Every legal kernel with every launch worth measuring.

    Raises:
        NoLegalCandidate: as `kernels`.
    """
    return [
        Candidate(kernel=kernel, launch=launch)
        for kernel in offered(problem, device, level=level)
        for launch in launches(kernel, problem, device)
    ]


def offered(
    problem: Problem, device: DeviceModel, *, level: Level = Level.CORE
) -> list[CutlassKernel]:
    """The legal kernels for a problem, those fitted to it on this device included.

    Raises:
        NoLegalCandidate: as `kernels`.
    """
    found = kernels(problem, device.arch, level=level)
    if level is Level.CORE and found[0].mainloop in TMA_MAINLOOPS:
        known = {kernel.name for kernel in found}
        found += [
            kernel
            for kernel in fitted.kernels(found[0], problem, device)
            if kernel.name not in known
        ]
    return found


def _like(problem: Problem) -> Problem:
    """A small problem that every rule judges as it does `problem`; else `problem` itself.

    The rules look at the alignment of rows, to 16 elements at most, at whether there is a batch,
    and at the number of tiles. That is no matter as long as even tiles of 8 by 8, padded to the
    widest cluster, would be few enough.
    """
    tiles_m, tiles_n = problem.m // 8 + MAX_CLUSTER_SIDE, problem.n // 8 + MAX_CLUSTER_SIDE
    if max(tiles_m, tiles_n, problem.batch) > MAX_GRID_YZ:
        return problem
    if tiles_m * tiles_n * problem.batch >= 2**31:
        return problem
    return replace(
        problem,
        m=gcd(problem.m, 16),
        n=gcd(problem.n, 16),
        k=gcd(problem.k, 16),
        batch=min(problem.batch, 2),
    )


@lru_cache(maxsize=1024)
def _legal(problem: Problem, level: Level) -> tuple[CutlassKernel, ...]:
    """The first family's kernels that suit the problem; none where no family has any."""
    for family in _families(problem, level):
        if legal := tuple(each for each in family if _suits(each, problem)):
            return legal
    return ()


def _families(problem: Problem, level: Level) -> list[tuple[CutlassKernel, ...]]:
    """The families in order of preference; building the later ones costs little and is cached."""
    source = core if level is Level.CORE else full
    operation = problem.operation
    width = operation.a.bytes
    whole = problem.n * operation.d.bytes % TMA_BYTES == 0
    found: list[tuple[CutlassKernel, ...]] = []
    if _rows_aligned(problem, TMA_BYTES // width):
        from_registers = source.tma_kernels(operation, EpilogueSchedule.NO_SMEM)
        if whole:
            either = source.tma_kernels(operation, EpilogueSchedule.TMA)
            if level is Level.FULL:
                either = tuple(dict.fromkeys((*either, *from_registers)))
            found.append(either)
        found.append(from_registers)
    padded = source.padded_kernels(
        operation, EpilogueSchedule.TMA if whole else EpilogueSchedule.NO_SMEM
    )
    for size in (16, 8, CPASYNC_MIN_BYTES):
        if _rows_aligned(problem, size // width):
            found.append((*padded, *source.cpasync_kernels(operation, size // width)))
            break
    found.append((*padded, *full.multistage_kernels(operation)))
    return found


def _rows_aligned(problem: Problem, alignment: int) -> bool:
    return problem.contiguous_a % alignment == 0 and problem.contiguous_b % alignment == 0


def _suits(kernel: CutlassKernel, problem: Problem) -> bool:
    return all(rule(kernel, problem) is None for rule in PROBLEM_RULES.values())
