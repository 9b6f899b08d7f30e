"""The family of CUTLASS 3.x kernels that a problem is offered, by the alignment of its rows.

On sm90 the families are: TMA kernels, if all rows of A and B start at multiples of 16 bytes; the
same with stores from registers, if rows of D do not; and for rows that TMA cannot read, TMA kernels
that copy them first, with `cp.async` kernels if rows start at multiples of 4 bytes. A problem is
offered the first family that takes it, because later ones compute the same more slowly. Kernels
whose tiles fit the problem's own extents are added elsewhere (`fitted`). Other architectures have
one family, the kernels that CUTLASS generates (`generated`).
"""

from __future__ import annotations

from functools import lru_cache

from gemmsmith.core.kernel import CutlassKernel, EpilogueSchedule
from gemmsmith.core.problem import Problem
from tuner.arch import SM90, Architecture
from tuner.backends.backend import Level
from tuner.backends.cutlass import generated
from tuner.backends.cutlass.alignment import cpasync_alignment, tma_reads, tma_stores
from tuner.backends.cutlass.lines import suited
from tuner.backends.cutlass3x import core, full, grouped, symmetric


@lru_cache(maxsize=1024)
def legal(problem: Problem, arch: Architecture, level: Level) -> tuple[CutlassKernel, ...]:
    """The kernels that take the problem, of the first family with any; may be empty."""
    if arch is not SM90:
        return suited(generated.kernels(problem.operation, arch), problem)
    for family in _families(problem, level):
        if kernels := suited(family, problem):
            return kernels
    return ()


def _families(problem: Problem, level: Level) -> list[tuple[CutlassKernel, ...]]:
    """The families in order of preference. All are listed at once: they are few, and cached."""
    if problem.operation.is_grouped:
        return [grouped.kernels(problem.operation, level)]
    if problem.operation.symmetric:
        return [symmetric.kernels(problem.operation, level)]
    source = core if level is Level.CORE else full
    operation = problem.operation
    aligned_d = tma_stores(problem)
    families: list[tuple[CutlassKernel, ...]] = []
    if tma_reads(problem):
        from_registers = source.tma_kernels(operation, EpilogueSchedule.NO_SMEM)
        if aligned_d:
            best = source.tma_kernels(operation, EpilogueSchedule.TMA)
            if level is Level.FULL:
                best = tuple(dict.fromkeys((*best, *from_registers)))
            families.append(best)
        families.append(from_registers)
    padded = source.padded_kernels(
        operation, EpilogueSchedule.TMA if aligned_d else EpilogueSchedule.NO_SMEM
    )
    alignment = cpasync_alignment(problem)
    cpasync = source.cpasync_kernels(operation, alignment) if alignment else ()
    families.append((*padded, *cpasync))
    return families
