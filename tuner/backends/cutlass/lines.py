"""Lines of the curated lists: kernels that differ in tile N, cluster and orientation.

Tile K is in bytes, so that one list serves all widths of elements: `depth` 128 is K = 64 for 16-bit
types and K = 128 for FP8. Kernels that a rule refuses for some types or layout are dropped when a
line is expanded; the lists do not repeat the rules.
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
    """Kernels that differ in tile N, cluster and orientation only. `depth` is tile K in bytes."""

    schedule: tuple[MainloopSchedule, TileScheduler]
    m: int
    ns: tuple[int, ...]
    clusters: tuple[tuple[int, int], ...]
    swapped: tuple[bool, ...]
    depth: int = 128
    stages: int = 0
    precise: bool = False  # FP8: also with precise accumulation
    direct: bool = False  # stores from registers even if TMA could store


def expand(
    line: KernelLine,
    operation: Operation,
    epilogue: EpilogueSchedule,
    alignment: int | None = None,
) -> Iterator[CutlassKernel]:
    """The kernels of a line, without names and not yet checked. `alignment` is TMA's by default."""
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


def expand_all(
    lines: Iterable[KernelLine],
    operation: Operation,
    epilogue: EpilogueSchedule,
    alignment: int | None = None,
) -> Iterator[CutlassKernel]:
    for line in lines:
        yield from expand(line, operation, epilogue, alignment)


def legal(
    kernels: Iterable[CutlassKernel], rules: Mapping[str, KernelRule]
) -> tuple[CutlassKernel, ...]:
    """The kernels that no rule refuses, with their names and without duplicates."""
    named_kernels = (named(kernel) for kernel in kernels if choice_refusal(kernel, rules) is None)
    return tuple({kernel.name: kernel for kernel in named_kernels}.values())


def suited(kernels: Iterable[CutlassKernel], problem: Problem) -> tuple[CutlassKernel, ...]:
    return tuple(kernel for kernel in kernels if problem_refusal(kernel, problem) is None)
