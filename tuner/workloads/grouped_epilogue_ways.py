"""torch's calls for a layer of experts up to its second product, and for the gradient before it.

The default is eager code: torch's grouped call (or a loop over the groups, if torch refuses it),
the activation or its gradient, and the products with up and with the router's shares. The finals
time two sequences beside it, and a kernel is recommended only if it beats both: the same code
through `torch.compile`, compiled for these sizes; and gemmsmith's own single pass after the grouped
product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from gemmsmith.core.activations import FUNCTIONS, activated, gradients
from gemmsmith.core.epilogue import Activation, Backward, EpilogueStep, StepKind
from gemmsmith.core.operation import Element
from gemmsmith.core.problem import Problem
from tuner.workloads import grouped_ways
from tuner.workloads.epilogue_ways import followed
from tuner.workloads.ways import compiled, first_of
from tuner.workloads.workload import Launch, OperandSet, Way, drawn_with

_SHARES = EpilogueStep(StepKind.MULTIPLY, "row_scale")


def defaults(problem: Problem) -> Sequence[Way]:
    """Eager calls."""
    value, gradient = FUNCTIONS[_activation(problem)].calls
    calls = f"then {value}, mul and mul"
    if problem.operation.epilogue.backward is not None:
        calls = f"then {value}, {gradient}, and products with up and factors"
    return tuple(
        Way(name=f"{way.name}, {calls}", launches=partial(_after, way, _eager), takes=way.takes)
        for way in grouped_ways.defaults(problem)
    )


def alternatives(problem: Problem) -> Sequence[Way]:
    """Sequences that may be faster than eager calls, if torch has a grouped kernel."""
    call = grouped_ways.defaults(problem)[0]
    if problem.operation.a is not Element.BF16 or not call.takes(problem):
        return ()
    ways = [Way.to_beat("torch.compile of the same", _compiled)]
    if _activation(problem) is Activation.SILU:  # the only one that `gemmsmith.experts` has
        one_pass = f"{call.name}, then one pass of gemmsmith.experts"
        ways.append(Way.to_beat(one_pass, partial(_after, call, _passed)))
    return ways


def _activation(problem: Problem) -> Activation:
    epilogue = problem.operation.epilogue
    return Activation((epilogue.backward or epilogue).activation or "")


_Follow = Callable[[torch.Tensor], torch.Tensor]
"""What is called after the bare product, [M, N]."""


def _after(
    way: Way,
    followed_by: Callable[[Problem, Sequence[OperandSet]], list[_Follow]],
    problem: Problem,
    sets: Sequence[OperandSet],
    room: int,
) -> list[Launch]:
    """The bare product of each set by `way`, and what follows it.

    Launches that do not allocate their output share one tensor, as the allocator would give it.
    """
    product = sets[0].d.new_empty(1, problem.m, problem.n)
    launches = way.launches(problem, [replace(s, d=product) for s in sets], room)

    def run(multiply: Launch, follow: _Follow) -> torch.Tensor:
        return follow(multiply().view(problem.m, -1))

    return [partial(run, *both) for both in zip(launches, followed_by(problem, sets), strict=True)]


def _eager(problem: Problem, sets: Sequence[OperandSet]) -> list[_Follow]:
    epilogue = problem.operation.epilogue
    parts = epilogue.backward

    def follow(s: OperandSet, shares: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
        if parts is not None:
            return _differentiated(parts, s, product)[0]
        return followed(epilogue.steps, s, product)[0].mul_(shares)

    return [partial(follow, s, drawn_with(s.row_scale)[0].to(s.d.dtype)) for s in sets]


def _differentiated(
    parts: Backward, s: OperandSet, product: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The gradient of gate, that of up, that of the factors, and the value."""
    aux, shares = drawn_with(s.aux)[0], drawn_with(s.row_scale)[0].to(product.dtype)
    value = activated(parts, aux)
    of_shares = (product * value).sum(-1)
    results = (*gradients(parts, product * shares, aux), of_shares)
    return (*results, value * shares) if parts.activated else results


def _compiled(problem: Problem, sets: Sequence[OperandSet], _: int) -> list[Launch]:
    epilogue = problem.operation.epilogue
    steps = (*epilogue.steps, _SHARES)

    def sequence(s: OperandSet) -> tuple[torch.Tensor, ...]:
        product = grouped_ways.grouped_mm(s)
        if (parts := epilogue.backward) is not None:
            return _differentiated(parts, s, product)
        return followed(steps, s, product)

    call = compiled(sequence)
    return [partial(first_of, call, s) for s in sets]


def _passed(problem: Problem, sets: Sequence[OperandSet]) -> list[_Follow]:
    from gemmsmith.ops.products import passes  # imports torch's compiler, which takes seconds

    rows, parts = (
        torch.arange(problem.m, device=sets[0].d.device),
        problem.operation.epilogue.backward,
    )

    def follow(s: OperandSet, product: torch.Tensor) -> torch.Tensor:
        shares, used = drawn_with(s.row_scale)[0], drawn_with(s.groups).offsets[-1:]
        if parts is None:
            return passes.activate(product, shares, rows, used)
        aux, needs = drawn_with(s.aux)[0], (True, True, parts.activated)
        both = passes.activate_backward(aux, shares, rows, used, product, needs)
        return drawn_with(both.gate_up)[:, : problem.n]

    return [partial(follow, s) for s in sets]
