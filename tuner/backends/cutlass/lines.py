"""Lines of the curated lists: kernels that differ in little, by their tiles in bytes.

In bytes, not elements, one list serves all widths: `depth` 128 is K = 64 for 16-bit types and 128
for FP8. A line that a rule refuses for some types or layout is left out there, so the lists state
intent and the rules stay the only judge.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from gemmsmith.core.kernel import CutlassKernel, EpilogueSchedule, MainloopSchedule, TileScheduler
from gemmsmith.core.legality import problem_refusal
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import Problem
from tuner.backends.cutlass.operation import TMA_BYTES, kernel, named
from tuner.backends.cutlass.rules import KernelRule, choice_refusal

ONE = ((1, 1),)
M2 = ((1, 1), (2, 1))
PAIRS = ((2, 1), (1, 2))
ALL = ((1, 1), (2, 1), (1, 2))
PLAIN = (False,)
SWAPPED = (True,)
BOTH = (False, True)


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelLine:
    """Kernels that differ in tile N, cluster and orientation only. `depth`: tile K in bytes."""

    schedule: tuple[MainloopSchedule, TileScheduler]
    m: int
    ns: tuple[int, ...]
    clusters: tuple[tuple[int, int], ...]
    swapped: tuple[bool, ...]
    depth: int = 128
    stages: int = 0
    precise: bool = False  # FP8: offered with precise accumulation as well
    direct: bool = False  # stores from registers even where TMA could store


def expand(
    line: KernelLine,
    operation: Operation,
    epilogue: EpilogueSchedule,
    alignment: int | None = None,
) -> Iterator[CutlassKernel]:
    """The kernels of a line, unnamed and unjudged; `alignment` is TMA's unless it is given."""
    mainloop, scheduler = line.schedule
    if line.direct:
        epilogue = EpilogueSchedule.NO_SMEM
    accumulation = (True, False) if line.precise else (True,)
    for n in line.ns:
        for cluster in line.clusters:
            for swapped in line.swapped:
                for fast in accumulation if operation.is_narrow_float else (False,):
                    yield kernel(
                        operation=operation,
                        tile=(line.m, n, line.depth // operation.a.bytes),
                        cluster=cluster,
                        stages=line.stages,
                        mainloop=mainloop,
                        epilogue=epilogue,
                        scheduler=scheduler,
                        alignment=alignment or TMA_BYTES // operation.a.bytes,
                        swapped=swapped,
                        fast_accumulation=fast,
                        name=False,
                    )


def legal(
    kernels: Iterable[CutlassKernel], rules: Mapping[str, KernelRule]
) -> tuple[CutlassKernel, ...]:
    """Those that no rule refuses, named, each once."""
    found = (named(each) for each in kernels if choice_refusal(each, rules) is None)
    return tuple({each.name: each for each in found}.values())


def suited(found: Iterable[CutlassKernel], problem: Problem) -> tuple[CutlassKernel, ...]:
    """Those of the kernels that take the problem."""
    return tuple(each for each in found if problem_refusal(each, problem) is None)
