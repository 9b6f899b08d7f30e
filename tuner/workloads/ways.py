"""torch's calls over operand sets, and the choice of a problem's default among them.

The launches rotate over the same operands as candidates do, and are captured and timed like them.
Preparations that are done once for all launches are not timed: copies of operands, and memory for
intermediate results, which the allocator would give again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from gemmsmith.core.problem import Problem
from tuner.workloads.workload import Launch, Launches, OperandSet, Way

_LOG = logging.getLogger(__name__)

COMPILER = "inductor"
"""The backend of `torch.compile`. Tests on the host replace it by one that compiles nothing."""

Sequenced = Callable[[OperandSet], tuple[torch.Tensor, ...]]
"""A sequence of calls, which returns D and further outputs."""


def first_that_runs(
    ways: Sequence[Way], problem: Problem, sets: Sequence[OperandSet], room: int
) -> tuple[str, list[Launch]]:
    """Name and launches of the first way that torch runs; it was launched once.

    Raises:
        torch.OutOfMemoryError, RuntimeError: the last way raised it, or the CUDA context is
            corrupt.
    """
    fitting = [way for way in ways if way.takes(problem)]
    for way in fitting[:-1]:
        try:
            return _launched(way, problem, sets, room)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise  # other ways would fail too: no memory is left, or the context is corrupt
        except (RuntimeError, TypeError, ValueError) as error:
            # Other versions of torch and of cuBLAS take other extents and keywords.
            reason = str(error).strip().splitlines()[:1]
            _LOG.warning("torch refuses %s for %s: %s", way.name, problem, *reason or ("",))
    return _launched(fitting[-1], problem, sets, room)


def _launched(
    way: Way, problem: Problem, sets: Sequence[OperandSet], room: int
) -> tuple[str, list[Launch]]:
    launches = way.launches(problem, sets, room)
    launches[0]()
    return way.name, launches


def mm_name(problem: Problem) -> str:
    return "torch.bmm" if problem.batch > 1 else "torch.mm"


def products(problem: Problem, sets: Sequence[OperandSet], _: int = 0) -> list[Launch]:
    return [_bmm(s) if problem.batch > 1 else _mm(s) for s in sets]


def on_copies(launches: Launches, dtype: torch.dtype) -> Launches:
    """The launches on operands that were converted before, without factors; D keeps its type."""

    def converted(problem: Problem, sets: Sequence[OperandSet], room: int) -> list[Launch]:
        wide = [replace(s, scale_a=None, scale_b=None) for s in copies(sets, dtype, room)]
        return launches(problem, wide, room)

    return converted


def copies(sets: Sequence[OperandSet], dtype: torch.dtype, room: int) -> list[OperandSet]:
    """Sets with copies of A and B in `dtype`: as many as fit in `room` bytes, at least one."""
    return [replace(s, a=s.a.to(dtype), b=s.b.to(dtype)) for s in _fitting(sets, dtype, room)]


def _fitting(sets: Sequence[OperandSet], dtype: torch.dtype, room: int) -> Sequence[OperandSet]:
    size = dtype.itemsize * (sets[0].a.numel() + sets[0].b.numel())
    return sets[: max(1, room // size)]


def products_of_unquantized(
    scales: Callable[[OperandSet], tuple[torch.Tensor | float, torch.Tensor | float]],
) -> Launches:
    """A·B of bf16 operands that were multiplied by their factors before.

    `scales` returns the factors of a set's A and B, which broadcast over [matrices, rows, columns].
    """

    def launches(problem: Problem, sets: Sequence[OperandSet], room: int) -> list[Launch]:
        wide = []
        for s in _fitting(sets, torch.bfloat16, room):
            scale_a, scale_b = scales(s)
            a, b = (s.a.float() * scale_a).bfloat16(), (s.b.float() * scale_b).bfloat16()
            wide.append(replace(s, a=a, b=b))
        return products(problem, wide)

    return launches


def then(launch: Launch, *steps: Launch) -> Launch:
    """The launch and then the steps; returns the last result."""

    def sequence() -> torch.Tensor:
        result = launch()
        for step in steps:
            result = step()
        return result

    return sequence


def compiled(sequence: Sequenced, *, beside_others: bool = False) -> Sequenced:
    """The sequence through `torch.compile`, for the sizes that it is called with.

    Dynamo limits how often one function is compiled, so all that was compiled for other problems is
    discarded first, unless this sequence runs `beside_others` of the same problem.
    """
    if not beside_others:
        torch._dynamo.reset()
    # No compiler processes: they would outlive this one if a launch corrupts its CUDA context.
    options: dict[str, Any] | None = {"compile_threads": 1} if COMPILER == "inductor" else None
    call: Sequenced = torch.compile(
        sequence, dynamic=False, fullgraph=True, backend=COMPILER, options=options
    )
    return call


def first_of(call: Sequenced, s: OperandSet) -> torch.Tensor:
    return call(s)[0]


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """A context in which torch's FP32 products run in TF32, or do not."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _mm(s: OperandSet) -> Launch:
    a, b, d = s.a[0], s.b[0], s.d[0]
    return lambda: torch.mm(a, b, out=d)


def _bmm(s: OperandSet) -> Launch:
    return lambda: torch.bmm(s.a, s.b, out=s.d)
