"""What torch programs run for a layer of experts up to its second product.

The default is eager code: torch's grouped call (a loop over the groups, where that is refused), the
activation, its product with up, and its product with the routers' shares. The finals time two more
beside it, and a kernel is recommended only where it beats both: the same through `torch.compile`,
compiled for these sizes, and the library's own single pass after the grouped product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from gemmsmith.core.activations import ACTIVATIONS
from gemmsmith.core.epilogue import Activation
from gemmsmith.core.operation import Element
from gemmsmith.core.problem import Problem
from tuner.workloads import grouped_ways
from tuner.workloads.fused_ways import CALLS, compiled, first_of
from tuner.workloads.gated_ways import activation_of
from tuner.workloads.workload import Launch, OperandSet, Way, drawn_with


def defaults(problem: Problem) -> Sequence[Way]:
    """Eager calls."""
    calls = f"then {CALLS[activation_of(problem)]}, mul and mul"
    return tuple(
        Way(name=f"{way.name}, {calls}", launches=partial(_eager, way), takes=way.takes)
        for way in grouped_ways.defaults(problem)
    )


def alternatives(problem: Problem) -> Sequence[Way]:
    """Whatever may beat eager calls, where torch has a grouped kernel that takes the problem."""
    call = grouped_ways.defaults(problem)[0]
    if problem.operation.a is not Element.BF16 or not call.takes(problem):
        return ()
    found = [("torch.compile of the same", _compiled)]
    if activation_of(problem) is Activation.SILU:
        found.append((f"{call.name}, then one pass of gemmsmith.experts", partial(_passed, call)))
    return tuple(
        Way(name=name, launches=launches, rival=True, is_to_be_beaten=True)
        for name, launches in found
    )


def _products(
    way: Way, problem: Problem, sets: Sequence[OperandSet], room: int
) -> list[tuple[OperandSet, Launch]]:
    """Each set, and the launch that gives its gate and up, [M, 2·I]. What does not allocate them
    writes to one tensor for all launches, as the allocator would give it.
    """
    both = sets[0].d.new_empty(1, problem.m, problem.n)
    launches = way.launches(problem, [replace(s, d=both) for s in sets], room)
    return list(zip(sets, launches, strict=True))


def _eager(way: Way, problem: Problem, sets: Sequence[OperandSet], room: int) -> list[Launch]:
    activate = ACTIVATIONS[activation_of(problem)]

    def run(multiply: Launch, shares: torch.Tensor) -> torch.Tensor:
        gate, up = multiply().view(problem.m, -1).chunk(2, -1)
        return (activate(gate) * up).mul_(shares)

    return [
        partial(run, multiply, drawn_with(s.row_scale)[0].to(s.d.dtype))
        for s, multiply in _products(way, problem, sets, room)
    ]


def _compiled(problem: Problem, sets: Sequence[OperandSet], _: int) -> list[Launch]:
    activate, stores = ACTIVATIONS[activation_of(problem)], problem.operation.epilogue.stores_aux

    def sequence(s: OperandSet) -> tuple[torch.Tensor, ...]:
        both = grouped_ways.grouped_mm(s)
        gate, up = both.chunk(2, -1)
        value = (activate(gate) * up).mul(drawn_with(s.row_scale)[0]).to(both.dtype)
        return (value, both) if stores else (value,)

    call = compiled(sequence)
    return [partial(first_of, call, s) for s in sets]


def _passed(way: Way, problem: Problem, sets: Sequence[OperandSet], room: int) -> list[Launch]:
    from gemmsmith.ops.products import passes  # and torch's compiler: seconds

    rows = torch.arange(problem.m, device=sets[0].d.device)

    def run(multiply: Launch, s: OperandSet) -> torch.Tensor:
        used = drawn_with(s.groups).offsets[-1:]
        return passes.activate(multiply(), drawn_with(s.row_scale)[0], rows, used)

    return [partial(run, multiply, s) for s, multiply in _products(way, problem, sets, room)]
