"""torch's calls for a layer of experts up to its second product.

The default is eager code: torch's grouped call (or a loop over the groups, if torch refuses it),
the activation, its product with up, and its product with the router's shares. The finals time two
sequences beside it, and a kernel is recommended only if it beats both: the same code through
`torch.compile`, compiled for these sizes; and gemmsmith's own single pass after the grouped
product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from gemmsmith.core.activations import FUNCTIONS
from gemmsmith.core.epilogue import Activation, EpilogueStep, StepKind
from gemmsmith.core.operation import Element
from gemmsmith.core.problem import Problem
from tuner.workloads import grouped_ways
from tuner.workloads.epilogue_ways import activation_of, followed, following
from tuner.workloads.ways import compiled, first_of
from tuner.workloads.workload import Launch, OperandSet, Way, drawn_with


def defaults(problem: Problem) -> Sequence[Way]:
    """Eager calls."""
    calls = f"then {FUNCTIONS[activation_of(problem)].calls[0]}, mul and mul"
    return tuple(
        Way(name=f"{way.name}, {calls}", launches=partial(_eager, way), takes=way.takes)
        for way in grouped_ways.defaults(problem)
    )


def alternatives(problem: Problem) -> Sequence[Way]:
    """Sequences that may be faster than eager calls, if torch has a grouped kernel."""
    call = grouped_ways.defaults(problem)[0]
    if problem.operation.a is not Element.BF16 or not call.takes(problem):
        return ()
    ways = [Way.to_beat("torch.compile of the same", _compiled)]
    if activation_of(problem) is Activation.SILU:  # the only one that `gemmsmith.experts` has
        one_pass = f"{call.name}, then one pass of gemmsmith.experts"
        ways.append(Way.to_beat(one_pass, partial(_passed, call)))
    return ways


def products(
    way: Way, problem: Problem, sets: Sequence[OperandSet], room: int
) -> list[tuple[OperandSet, Launch]]:
    """The sets, each with the launch that computes its bare product, [M, N].

    Launches that do not allocate their output share one tensor, as the allocator would give it.
    """
    product = sets[0].d.new_empty(1, problem.m, problem.n)
    launches = way.launches(problem, [replace(s, d=product) for s in sets], room)
    return list(zip(sets, launches, strict=True))


def _eager(way: Way, problem: Problem, sets: Sequence[OperandSet], room: int) -> list[Launch]:
    steps = following(problem.operation.epilogue)

    def run(multiply: Launch, s: OperandSet, shares: torch.Tensor) -> torch.Tensor:
        return followed(steps, s, multiply().view(problem.m, -1))[0].mul_(shares)

    return [
        partial(run, multiply, s, drawn_with(s.row_scale)[0].to(s.d.dtype))
        for s, multiply in products(way, problem, sets, room)
    ]


def _compiled(problem: Problem, sets: Sequence[OperandSet], _: int) -> list[Launch]:
    steps = [*following(problem.operation.epilogue), EpilogueStep(StepKind.MULTIPLY, "row_scale")]

    def sequence(s: OperandSet) -> tuple[torch.Tensor, ...]:
        return followed(steps, s, grouped_ways.grouped_mm(s))

    call = compiled(sequence)
    return [partial(first_of, call, s) for s in sets]


def _passed(way: Way, problem: Problem, sets: Sequence[OperandSet], room: int) -> list[Launch]:
    from gemmsmith.ops.products import passes  # imports torch's compiler, which takes seconds

    rows = torch.arange(problem.m, device=sets[0].d.device)

    def run(multiply: Launch, s: OperandSet) -> torch.Tensor:
        used = drawn_with(s.groups).offsets[-1:]
        return passes.activate(multiply(), drawn_with(s.row_scale)[0], rows, used)

    return [partial(run, multiply, s) for s, multiply in products(way, problem, sets, room)]
