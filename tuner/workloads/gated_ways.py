"""torch's calls for a product of gate and up with its activation.

The default is what eager code runs: one `torch.mm` for both (`torch._scaled_mm` for FP8), then one
kernel for the activation and one for the product of the halves. The finals time other sequences
beside it, and a fused kernel is recommended only if it beats them all: the same code through
`torch.compile`, compiled for these sizes; and two products, as in programs with two weights,
followed by eager or compiled code.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from gemmsmith.core.activations import ACTIVATIONS
from gemmsmith.core.epilogue import Activation
from gemmsmith.core.problem import Problem
from tuner.workloads.fused_ways import CALLS, activate, compiled, multiplied
from tuner.workloads.scaled import is_taken
from tuner.workloads.ways import on_copies
from tuner.workloads.workload import Launch, OperandSet, Way


def defaults(problem: Problem) -> Sequence[Way]:
    """Eager calls; on bf16 copies if cuBLAS does not take FP8 operands of these extents."""
    if not problem.operation.is_scaled:
        return (Way(name=_named("torch.mm", problem), launches=_eager),)
    return (
        Way(name=_named("torch._scaled_mm", problem), launches=_eager, takes=is_taken),
        Way(
            name=_named("torch.mm on bf16 copies", problem),
            launches=on_copies(_eager, torch.bfloat16),
        ),
    )


def alternatives(problem: Problem) -> Sequence[Way]:
    """Sequences that may be faster than eager calls."""
    operation = problem.operation
    if operation.is_scaled and not is_taken(problem):
        return ()
    ways = [Way.to_beat("torch.compile of the same", _compiled)]
    if not operation.is_scaled:
        ways += [
            Way.to_beat(_named("torch.mm twice", problem), _eager_of_two),
            Way.to_beat("torch.compile of two products", _compiled_of_two),
        ]
    return ways


def _named(call: str, problem: Problem) -> str:
    return f"{call}, then {CALLS[activation_of(problem)]} and mul"


def activation_of(problem: Problem) -> Activation:
    activation = problem.operation.epilogue.activation
    assert activation is not None  # noqa: S101 - every gate has one
    return activation


def _eager(problem: Problem, sets: Sequence[OperandSet], _: int = 0) -> list[Launch]:
    """One call after another; the last writes D."""
    activation, d = activation_of(problem), sets[0].d
    # One tensor for all launches, as the allocator would give it; aux is stored with D.
    activated = torch.empty_like(d[0])
    both = None if len(d) > 1 else d.new_empty(problem.m, problem.n)
    return [partial(_run, activation, s, both, activated) for s in sets]


def _run(
    activation: Activation, s: OperandSet, both: torch.Tensor | None, activated: torch.Tensor
) -> torch.Tensor:
    gate, up = multiplied(s, _aux(s) if both is None else both).chunk(2, -1)
    return torch.mul(activate(activation, gate, activated), up, out=s.d[0])


def _aux(s: OperandSet) -> torch.Tensor:
    # Gate and up follow D in memory, as one matrix [M, 2·I].
    return s.d[1:].view(s.d.shape[1], -1)


def _eager_of_two(problem: Problem, sets: Sequence[OperandSet], _: int = 0) -> list[Launch]:
    activation, like = activation_of(problem), sets[0].d[0]
    gate, up, activated = (torch.empty_like(like) for _ in range(3))

    def run(s: OperandSet) -> torch.Tensor:
        half = problem.columns
        torch.mm(s.a[0], s.b[0][:, :half], out=gate)
        torch.mm(s.a[0], s.b[0][:, half:], out=up)
        return torch.mul(activate(activation, gate, activated), up, out=s.d[0])

    return [partial(run, s) for s in sets]


def _compiled(problem: Problem, sets: Sequence[OperandSet], _: int) -> list[Launch]:
    """The whole sequence as one compiled function, which allocates its outputs."""
    function = ACTIVATIONS[activation_of(problem)]
    stores = problem.operation.epilogue.stores_aux

    def sequence(s: OperandSet) -> tuple[torch.Tensor, ...]:
        both = multiplied(s)
        gate, up = both.chunk(2, -1)
        return (function(gate) * up, both) if stores else (function(gate) * up,)

    return compiled(sequence, sets)


def _compiled_of_two(problem: Problem, sets: Sequence[OperandSet], _: int) -> list[Launch]:
    function, half = ACTIVATIONS[activation_of(problem)], problem.columns
    stores = problem.operation.epilogue.stores_aux

    def sequence(s: OperandSet) -> tuple[torch.Tensor, ...]:
        gate, up = torch.mm(s.a[0], s.b[0][:, :half]), torch.mm(s.a[0], s.b[0][:, half:])
        return (function(gate) * up, gate, up) if stores else (function(gate) * up,)

    # The finals run it beside `_compiled`, whose code must not be discarded.
    return compiled(sequence, sets, beside_others=True)
