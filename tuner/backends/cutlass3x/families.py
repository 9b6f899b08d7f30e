"""Which kernels of CUTLASS 3.x a problem is offered, by what their copies need of its rows.

TMA where all rows of A and B start on 16 bytes, with stores from registers where those of D do
not; for rows that TMA cannot read TMA after a copy, and cp.async where they start on 4 bytes. A
problem is offered the first family it qualifies for: the later ones compute the same, slower. To
the curated kernels come those whose tiles fit the problem's own extents (`fitted`). That is sm90;
elsewhere it is offered what CUTLASS generates (`generated`).
"""

from __future__ import annotations

from functools import lru_cache

from gemmsmith.core.kernel import CutlassKernel, EpilogueSchedule
from gemmsmith.core.problem import Problem
from tuner.arch import SM90, Architecture
from tuner.backends.backend import Level
from tuner.backends.cutlass import generated
from tuner.backends.cutlass.alignment import cpasync_alignment, d_is_whole, tma_reads
from tuner.backends.cutlass.lines import suited
from tuner.backends.cutlass3x import core, full, grouped


@lru_cache(maxsize=1024)
def legal(problem: Problem, arch: Architecture, level: Level) -> tuple[CutlassKernel, ...]:
    """The first family's kernels that suit the problem; none where no family has any."""
    curated = arch is SM90
    families = (
        _families(problem, level) if curated else [generated.kernels(problem.operation, arch)]
    )
    for family in families:
        if found := suited(family, problem):
            return found
    return ()


def _families(problem: Problem, level: Level) -> list[tuple[CutlassKernel, ...]]:
    """The families in order of preference; building the later ones costs little and is cached."""
    if problem.operation.is_grouped:
        return [grouped.kernels(problem.operation, level)]
    source = core if level is Level.CORE else full
    operation = problem.operation
    whole = d_is_whole(problem)
    found: list[tuple[CutlassKernel, ...]] = []
    if tma_reads(problem):
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
    alignment = cpasync_alignment(problem)
    cpasync = source.cpasync_kernels(operation, alignment) if alignment else ()
    found.append((*padded, *cpasync))
    return found
