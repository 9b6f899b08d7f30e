"""What torch programs run for a product of gate and up, and what one makes of the other.

The default is what eager code runs: one `torch.mm` of both (`torch._scaled_mm` for FP8), then a
kernel of torch's for the activation and one for the product of the halves. The finals time the
other sequences beside it, and a fused kernel is recommended only where it beats them all: the same
code through `torch.compile`, compiled for these very sizes, and two products, as programs with a
weight for each run them, followed by eager or by compiled code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from gemmsmith.core.activations import ACTIVATIONS
from gemmsmith.core.epilogue import Activation
from gemmsmith.core.problem import Problem
from tuner.workloads.fused_ways import CALLS, compiled, first_of, multiplied
from tuner.workloads.scaled import is_taken
from tuner.workloads.ways import copies
from tuner.workloads.workload import Launch, OperandSet, Way


def defaults(problem: Problem) -> Sequence[Way]:
    """Eager calls; of bf16 copies where cuBLAS does not take FP8 of these extents."""
    if not problem.operation.is_scaled:
        return (Way(name=_named("torch.mm", problem), launches=_eager),)
    return (
        Way(name=_named("torch._scaled_mm", problem), launches=_eager, takes=is_taken),
        Way(name=_named("torch.mm on bf16 copies", problem), launches=_of_copies),
    )


def alternatives(problem: Problem) -> Sequence[Way]:
    """Whatever may beat eager calls."""
    operation = problem.operation
    if operation.is_scaled and not is_taken(problem):
        return ()
    found: list[Way] = []

    def add(name: str, launches: Callable[..., list[Launch]]) -> None:
        found.append(Way(name=name, launches=launches, rival=True, is_to_be_beaten=True))

    add("torch.compile of the same", _compiled)
    if not operation.is_scaled:
        add(_named("torch.mm twice", problem), _eager_of_two)
        add("torch.compile of two products", _compiled_of_two)
    return found


def _named(call: str, problem: Problem) -> str:
    """The calls, as the record shows them."""
    return f"{call}, then {CALLS[activation_of(problem)]} and mul"


def activation_of(problem: Problem) -> Activation:
    """What the gate is put through."""
    activation = problem.operation.epilogue.activation
    assert activation is not None  # noqa: S101 - every gate has one
    return activation


def _eager(problem: Problem, sets: Sequence[OperandSet], _: int = 0) -> list[Launch]:
    """Call after call, the last into D. What lies between is one tensor for all launches, as the
    allocator would give it; but aux is kept.
    """
    activation, d = activation_of(problem), sets[0].d
    activated = torch.empty_like(d[0])
    both = None if len(d) > 1 else d.new_empty(problem.m, problem.n)
    return [partial(_run, activation, s, both, activated) for s in sets]


def _run(
    activation: Activation, s: OperandSet, both: torch.Tensor | None, activated: torch.Tensor
) -> torch.Tensor:
    gate, up = multiplied(s, _aux(s) if both is None else both).chunk(2, -1)
    return _gated(activation, gate, up, activated, s.d[0])


def _aux(s: OperandSet) -> torch.Tensor:
    """Gate and up behind D, [M, 2·I]."""
    return s.d[1:].view(s.d.shape[1], -1)


def _gated(
    activation: Activation,
    gate: torch.Tensor,
    up: torch.Tensor,
    activated: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    aten = torch.ops.aten
    match activation:
        case Activation.SILU:
            aten.silu.out(gate, out=activated)
        case Activation.GELU_TANH:
            aten.gelu.out(gate, approximate="tanh", out=activated)
        case _:
            aten.gelu.out(gate, out=activated)
    return torch.mul(activated, up, out=out)


def _eager_of_two(problem: Problem, sets: Sequence[OperandSet], _: int = 0) -> list[Launch]:
    activation, like = activation_of(problem), sets[0].d[0]
    gate, up, activated = (torch.empty_like(like) for _ in range(3))

    def run(s: OperandSet) -> torch.Tensor:
        half = problem.columns
        torch.mm(s.a[0], s.b[0][:, :half], out=gate)
        torch.mm(s.a[0], s.b[0][:, half:], out=up)
        return _gated(activation, gate, up, activated, s.d[0])

    return [partial(run, s) for s in sets]


def _of_copies(problem: Problem, sets: Sequence[OperandSet], room: int) -> list[Launch]:
    """bf16 operands, converted beforehand, without factors."""
    wide = copies(sets, torch.bfloat16, room)
    return _eager(problem, [replace(s, scale_a=None, scale_b=None) for s in wide])


def _compiled(problem: Problem, sets: Sequence[OperandSet], _: int) -> list[Launch]:
    """The whole sequence as one compiled function, which allocates what it gives."""
    activate = ACTIVATIONS[activation_of(problem)]
    stores = problem.operation.epilogue.stores_aux

    def sequence(s: OperandSet) -> tuple[torch.Tensor, ...]:
        both = multiplied(s)
        gate, up = both.chunk(2, -1)
        return (activate(gate) * up, both) if stores else (activate(gate) * up,)

    call = compiled(sequence)
    return [partial(first_of, call, s) for s in sets]


def _compiled_of_two(problem: Problem, sets: Sequence[OperandSet], _: int) -> list[Launch]:
    activate, half = ACTIVATIONS[activation_of(problem)], problem.columns
    stores = problem.operation.epilogue.stores_aux

    def sequence(s: OperandSet) -> tuple[torch.Tensor, ...]:
        gate, up = torch.mm(s.a[0], s.b[0][:, :half]), torch.mm(s.a[0], s.b[0][:, half:])
        return (activate(gate) * up, gate, up) if stores else (activate(gate) * up,)

    # The finals time it beside `_compiled`, which comes before it and is not to be compiled again.
    call = compiled(sequence, beside_others=True)
    return [partial(first_of, call, s) for s in sets]
