"""torch's calls for grouped products.

`torch._grouped_mm` and, for FP8 with factors of rows, `torch._scaled_grouped_mm` read the offsets
of groups on the device. They need rows aligned to 16 bytes, and return D in 16 bits only, so a
gradient that is summed in FP32 is rounded first and takes one more pass. They are the default: what
a program runs that does not wait for the device. A program that has waited, and knows the offsets
on the host, can call `torch.mm` once per group, which is faster with few large groups and exact
with FP32 output. So the finals time that loop beside the default.

If torch has no grouped kernel (fp16, or bf16 on other GPUs than SM90 and SM100, as of 2.11), its
call waits for the device and loops itself. That cannot be captured, so our loop is timed instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import cycle

import torch
from torch.nn import functional

from gemmsmith.core.operation import Grouping
from gemmsmith.core.problem import Problem
from tuner.workloads.scaled import factors, is_taken, scaled_mm
from tuner.workloads.spreads import TMA_BYTES
from tuner.workloads.ways import copies, then
from tuner.workloads.workload import Launch, Launches, OperandSet, Way, drawn_with

_IS_PRIVATE = hasattr(torch, "_grouped_mm")
_GROUPED_MM = "torch._grouped_mm" if _IS_PRIVATE else "torch.nn.functional.grouped_mm"


def defaults(problem: Problem) -> Sequence[Way]:
    """The grouped call, or a loop over the groups for extents that the call refuses."""
    operation = problem.operation
    if operation.is_scaled:
        return (
            Way(name="torch._scaled_grouped_mm", launches=_scaled, takes=is_taken),
            Way(
                name="loop of torch.mm on bf16 copies",
                launches=_on_copies(_looped, torch.bfloat16),
            ),
        )
    if not _is_wide(problem):
        return (Way(name=_GROUPED_MM, launches=_grouped, takes=_is_aligned), _loop(problem))
    after = "add_" if operation.accumulate else "float"
    in_fp32 = Way(
        name=f"loop of {_call(problem)} on float32 copies",
        launches=_on_copies(_looped, torch.float32),
    )
    return (
        Way(name=f"{_GROUPED_MM}, then {after}", launches=_grouped, takes=_is_aligned),
        _loop(problem),
        in_fp32,
    )


def alternatives(problem: Problem) -> Sequence[Way]:
    """The loop; for FP8 also the grouped call with precise sums, and on bf16 copies."""
    if not problem.operation.is_scaled:
        return (_loop(problem),) if _is_aligned(problem) else ()
    if not is_taken(problem):
        return ()
    others = (
        Way(
            name="torch._scaled_grouped_mm without fast accumulation",
            launches=partial(_scaled, fast=False),
        ),
        Way(
            name=f"{_GROUPED_MM} on bf16 copies",
            launches=_on_copies(_products, torch.bfloat16),
        ),
    )
    if problem.operation.grouping is Grouping.ROWS:
        return others  # groups have any number of rows, and cuBLAS refuses many, such as 285
    return (Way(name="loop of torch._scaled_mm", launches=_scaled_loop, rival=True), *others)


def _is_wide(problem: Problem) -> bool:
    # torch's grouped call cannot store a D with more bits than the operands.
    return problem.operation.d.bits > problem.operation.a.bits


def _is_aligned(problem: Problem) -> bool:
    width = problem.operation.a.bytes
    rows = (problem.contiguous_a * width, problem.contiguous_b * width)
    return all(size % TMA_BYTES == 0 for size in rows)


def _call(problem: Problem) -> str:
    return "torch.addmm" if problem.operation.accumulate else "torch.mm"


def _loop(problem: Problem) -> Way:
    if _is_wide(problem):
        wide = partial(_looped, out_dtype=torch.float32)
        return Way(name=f"loop of {_call(problem)} with out_dtype", launches=wide, rival=True)
    return Way(name=f"loop of {_call(problem)}", launches=_looped, rival=True)


def _grouped(problem: Problem, sets: Sequence[OperandSet], _: int) -> list[Launch]:
    """The grouped call, whose result is copied or added into a wider D.

    Raises:
        RuntimeError: the call would wait for the device.
    """
    with _without_waiting(sets[0].d.device):
        _product(problem, sets[0])
    if not _is_wide(problem):
        return _products(problem, sets)
    add = problem.operation.accumulate

    def launch(s: OperandSet) -> torch.Tensor:
        product = _product(problem, s)
        return s.d.add_(product) if add else s.d.copy_(product)

    return [partial(launch, s) for s in sets]


@contextmanager
def _without_waiting(place: torch.device) -> Iterator[None]:
    """A context in which a call that waits for the device raises RuntimeError."""
    if place.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _products(problem: Problem, sets: Sequence[OperandSet], _: int = 0) -> list[Launch]:
    return [partial(_product, problem, s) for s in sets]


def _product(problem: Problem, s: OperandSet) -> torch.Tensor:
    return grouped_mm(s, s.b if problem.operation.grouping is Grouping.ROWS else s.b[0])


def grouped_mm(s: OperandSet, b: torch.Tensor | None = None) -> torch.Tensor:
    """The grouped call of torch, which allocates its result. `b` is the set's by default."""
    call = torch._grouped_mm if _IS_PRIVATE else functional.grouped_mm
    return call(s.a[0], s.b if b is None else b, offs=drawn_with(s.groups).offsets)


def _scaled(
    problem: Problem, sets: Sequence[OperandSet], _: int, *, fast: bool = True
) -> list[Launch]:
    """The call takes factors [tokens] and [groups, N] by rows, flat ones by depth."""
    by_rows = problem.operation.grouping is Grouping.ROWS

    def launch(s: OperandSet) -> torch.Tensor:
        scale_a, scale_b = factors(s)
        return torch._scaled_grouped_mm(
            s.a[0],
            s.b if by_rows else s.b[0],
            scale_a.view(-1),
            scale_b[:, 0] if by_rows else scale_b.view(-1),
            offs=drawn_with(s.groups).offsets,
            out_dtype=s.d.dtype,
            use_fast_accum=fast,
        )

    return [partial(launch, s) for s in sets]


def _looped(
    problem: Problem, sets: Sequence[OperandSet], _: int, *, out_dtype: torch.dtype | None = None
) -> list[Launch]:
    """One call for each group that has tokens; it writes the group's part of D, or adds to it."""
    keywords = {} if out_dtype is None else {"out_dtype": out_dtype}
    add = problem.operation.accumulate

    def step(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, *_: torch.Tensor) -> Launch:
        return (
            partial(torch.addmm, d, a, b, out=d, **keywords)
            if add
            else partial(torch.mm, a, b, out=d, **keywords)
        )

    return [_through(problem, s, step) for s in sets]


def _on_copies(launches: Launches, dtype: torch.dtype) -> Launches:
    """The launches of all sets, which share converted copies of as many operands as fit."""

    def converted(problem: Problem, sets: Sequence[OperandSet], room: int) -> list[Launch]:
        distinct = list({s.a.data_ptr(): s for s in sets}.values())
        wide = copies(distinct, dtype, room)
        shared = [replace(s, a=copy.a, b=copy.b) for s, copy in zip(sets, cycle(wide))]
        return launches(problem, shared, room)

    return converted


def _scaled_loop(problem: Problem, sets: Sequence[OperandSet], _: int) -> list[Launch]:
    def step(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, *scales: torch.Tensor) -> Launch:
        scale_a, scale_b = scales
        return partial(scaled_mm, a, b, (scale_a, scale_b), d.dtype, out=d)

    return [_through(problem, s, step) for s in sets]


def _through(problem: Problem, s: OperandSet, step: Callable[..., Launch]) -> Launch:
    """One step per group, in order. The gradient of a group without tokens is set to zero."""
    steps: list[Launch] = []
    for group, run in enumerate(drawn_with(s.groups).runs):
        if run.start < run.stop:
            steps.append(step(*_parts(problem, s, group, run)))
        elif problem.operation.grouping is Grouping.DEPTH and not problem.operation.accumulate:
            steps.append(s.d[group].zero_)
    return then(lambda: s.d, *steps, lambda: s.d)


def _parts(problem: Problem, s: OperandSet, group: int, run: slice) -> Iterator[torch.Tensor]:
    """A group's A, B and D, and its factors if it has any."""
    by_rows = problem.operation.grouping is Grouping.ROWS
    if by_rows:
        yield from (s.a[0, run], s.b[group], s.d[0, run])
    else:
        yield from (s.a[0, :, run], s.b[0, run], s.d[group])
    if s.scale_a is not None and s.scale_b is not None:
        yield from (s.scale_a[0, run] if by_rows else s.scale_a[group], s.scale_b[group])
