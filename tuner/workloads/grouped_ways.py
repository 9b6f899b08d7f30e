"""torch's calls for grouped products.

`torch._grouped_mm` and, for FP8 with factors of rows, `torch._scaled_grouped_mm` take the ends of
groups from the device. They want rows of 16 bytes, and give D in 16 bits only: a gradient that is
summed in FP32 takes one more pass, and was rounded before, which is what programs put up with. A
program that knows the ends on the host, because it has waited for the device, may as well call
`torch.mm` once per group: with few large groups that is faster, and exact with FP32 output. So the
loop is timed in the finals beside the grouped call, which is the default: what a program runs that
never waits.

Where torch has no grouped kernel (fp16; bf16 on other GPUs than SM90 and SM100, as of 2.11), its
call waits and loops itself. That cannot be captured, and the loop stands for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch.nn import functional

from gemmsmith.core.operation import Grouping
from gemmsmith.core.problem import Problem
from tuner.workloads.scaled import factors, is_taken
from tuner.workloads.spreads import TMA_BYTES
from tuner.workloads.ways import copies, then
from tuner.workloads.workload import Launch, OperandSet, Way, drawn_with

_IS_PRIVATE = hasattr(torch, "_grouped_mm")
_GROUPED_MM = "torch._grouped_mm" if _IS_PRIVATE else "torch.nn.functional.grouped_mm"


def defaults(problem: Problem) -> Sequence[Way]:
    """The grouped call; for extents that it refuses a loop over the groups."""
    operation = problem.operation
    if operation.is_scaled:
        return (
            Way(name="torch._scaled_grouped_mm", launches=_fast, takes=is_taken),
            Way(name="loop of torch.mm on bf16 copies", launches=_loop_of_copies(torch.bfloat16)),
        )
    if not _is_wide(problem):
        return (Way(name=_GROUPED_MM, launches=_grouped, takes=_is_aligned), _loop(problem))
    after = "add_" if operation.accumulate else "float"
    in_fp32 = Way(
        name=f"loop of {_call(problem)} on float32 copies",
        launches=_loop_of_copies(torch.float32),
    )
    return (
        Way(name=f"{_GROUPED_MM}, then {after}", launches=_grouped, takes=_is_aligned),
        _loop(problem),
        in_fp32,
    )


def alternatives(problem: Problem) -> Sequence[Way]:
    """The loop, which finals time beside the grouped call; of FP8 also precise sums, and bf16."""
    if not problem.operation.is_scaled:
        return (_loop(problem),) if _is_aligned(problem) else ()
    if not is_taken(problem):
        return ()
    others = (
        Way(name="torch._scaled_grouped_mm without fast accumulation", launches=_precise),
        Way(name=f"{_GROUPED_MM} on bf16 copies", launches=_grouped_copies),
    )
    if problem.operation.grouping is Grouping.ROWS:
        return others  # cuBLAS refuses 285 rows with factors, and groups have any number
    return (Way(name="loop of torch._scaled_mm", launches=_scaled_loop, rival=True), *others)


def _is_wide(problem: Problem) -> bool:
    """Whether D has more bits than the operands, which torch's grouped call cannot write."""
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
    """What the call gives; a wider D that it is copied or added into.

    Raises:
        RuntimeError: torch would wait for the device.
    """
    with _without_waiting(sets[0].d.device):
        _product(problem, sets[0])
    if not _is_wide(problem):
        return [partial(_product, problem, s) for s in sets]
    add = problem.operation.accumulate

    def into(s: OperandSet) -> torch.Tensor:
        product = _product(problem, s)
        return s.d.add_(product) if add else s.d.copy_(product)

    return [partial(into, s) for s in sets]


@contextmanager
def _without_waiting(place: torch.device) -> Iterator[None]:
    """Within it, a call that waits for the device is an error."""
    if place.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _grouped_copies(problem: Problem, sets: Sequence[OperandSet], room: int) -> list[Launch]:
    wide = _copied(sets, torch.bfloat16, room)
    return [partial(_product, problem, s) for s in wide]


def _product(problem: Problem, s: OperandSet) -> torch.Tensor:
    return grouped_mm(s, s.b if problem.operation.grouping is Grouping.ROWS else s.b[0])


def grouped_mm(s: OperandSet, b: torch.Tensor | None = None) -> torch.Tensor:
    """What torch's grouped call gives, in memory of its own; `b` is the set's where it is None."""
    call = torch._grouped_mm if _IS_PRIVATE else functional.grouped_mm
    return call(s.a[0], s.b if b is None else b, offs=drawn_with(s.groups).offsets)


def _fast(problem: Problem, sets: Sequence[OperandSet], _: int) -> list[Launch]:
    return [_scaled(problem, s, fast=True) for s in sets]


def _precise(problem: Problem, sets: Sequence[OperandSet], _: int) -> list[Launch]:
    return [_scaled(problem, s, fast=False) for s in sets]


def _scaled(problem: Problem, s: OperandSet, *, fast: bool) -> Launch:
    """Factors are [tokens] and [groups, N] by rows, [groups · M] and [groups · N] by depth."""
    scale_a, scale_b = factors(s)
    by_rows = problem.operation.grouping is Grouping.ROWS
    return partial(
        torch._scaled_grouped_mm,
        s.a[0],
        s.b if by_rows else s.b[0],
        scale_a.view(-1),
        scale_b[:, 0] if by_rows else scale_b.view(-1),
        offs=drawn_with(s.groups).offsets,
        out_dtype=s.d.dtype,
        use_fast_accum=fast,
    )


def _looped(
    problem: Problem,
    sets: Sequence[OperandSet],
    _: int,
    *,
    out_dtype: torch.dtype | None = None,
) -> list[Launch]:
    """A call for each group that has tokens, into or onto its part of D."""
    how = {} if out_dtype is None else {"out_dtype": out_dtype}
    add = problem.operation.accumulate

    def step(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, *_: torch.Tensor) -> Launch:
        return (
            partial(torch.addmm, d, a, b, out=d, **how)
            if add
            else partial(torch.mm, a, b, out=d, **how)
        )

    return [_through(problem, s, step) for s in sets]


def _loop_of_copies(dtype: torch.dtype) -> Callable[..., list[Launch]]:
    """The loop of operands that were converted beforehand, without factors."""

    def launches(problem: Problem, sets: Sequence[OperandSet], room: int) -> list[Launch]:
        return _looped(problem, _copied(sets, dtype, room), room)

    return launches


def _scaled_loop(problem: Problem, sets: Sequence[OperandSet], _: int) -> list[Launch]:
    def step(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, *scales: torch.Tensor) -> Launch:
        scale_a, scale_b = scales
        return partial(
            torch._scaled_mm,
            a,
            b,
            scale_a=scale_a,
            scale_b=scale_b,
            out_dtype=d.dtype,
            use_fast_accum=True,
            out=d,
        )

    return [_through(problem, s, step) for s in sets]


def _through(problem: Problem, s: OperandSet, step: Callable[..., Launch]) -> Launch:
    """The groups one after the other; the gradient of one without tokens is zero."""
    steps: list[Launch] = []
    for group, run in enumerate(drawn_with(s.groups).runs):
        if run.start < run.stop:
            steps.append(step(*_parts(problem, s, group, run)))
        elif problem.operation.grouping is Grouping.DEPTH and not problem.operation.accumulate:
            steps.append(s.d[group].zero_)
    return then(lambda: s.d, *steps, lambda: s.d)


def _parts(problem: Problem, s: OperandSet, group: int, run: slice) -> Iterator[torch.Tensor]:
    """One group's A, B and D, and its factors where there are any."""
    by_rows = problem.operation.grouping is Grouping.ROWS
    if by_rows:
        yield from (s.a[0, run], s.b[group], s.d[0, run])
    else:
        yield from (s.a[0, :, run], s.b[0, run], s.d[group])
    if s.scale_a is not None and s.scale_b is not None:
        yield from (s.scale_a[0, run] if by_rows else s.scale_a[group], s.scale_b[group])


def _copied(sets: Sequence[OperandSet], dtype: torch.dtype, room: int) -> list[OperandSet]:
    """All sets, with copies of as many different operands as fit in `room` bytes."""
    distinct = list({s.a.data_ptr(): s for s in sets}.values())
    wide = copies(distinct, dtype, room)
    return [
        replace(s, a=wide[i % len(wide)].a, b=wide[i % len(wide)].b) for i, s in enumerate(sets)
    ]
