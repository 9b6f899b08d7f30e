"""torch's calls for the input gradient of a layer and of the activation before it.

The default is what autograd runs in eager code: `torch.mm`, torch's backward kernel of the
activation, and one kernel for each further output. For a gated activation that is two elementwise
products and the activation's backward kernel; its value comes from the forward pass, unless the
epilogue gives the value too. The finals time other sequences beside it: the same code through
`torch.compile`, compiled for these sizes; and for gated activations the same kernels with gate and
up as two matrices, as layers with separate weights have them.

cuBLASLt's DGELU and DGELU_BGRAD are not among them: neither an operator of torch nor the backend
`cublaslt`, which has bare products only, can run them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from gemmsmith.core.activations import FUNCTIONS, activated, gradients
from gemmsmith.core.epilogue import Backward
from gemmsmith.core.problem import Problem
from tuner.workloads.ways import compiled, first_of
from tuner.workloads.workload import Launch, OperandSet, Way, drawn_with


def defaults(problem: Problem) -> Sequence[Way]:
    parts = _parts(problem)
    return (Way(name=_named(parts), launches=_gated if parts.gated else _plain),)


def alternatives(problem: Problem) -> Sequence[Way]:
    """Sequences that may be faster than eager calls."""
    parts = _parts(problem)
    ways = [Way.to_beat("torch.compile of the same", _compiled)]
    if parts.gated:
        ways.append(Way.to_beat(f"{_named(parts)}, gate and up apart", _apart))
    return ways


def _parts(problem: Problem) -> Backward:
    parts = problem.operation.epilogue.backward
    assert parts is not None  # noqa: S101 - every problem here has a backward epilogue
    return parts


def _named(parts: Backward) -> str:
    steps = [
        "torch.mm",
        *(["mul twice"] if parts.gated else []),
        FUNCTIONS[parts.activation].calls[1],
    ]
    if parts.activated:
        steps.append("the activation" + (" and mul" if parts.gated else ""))
    if parts.bias_gradient:
        steps.append("sum")
    return ", then ".join(steps)


def _plain(problem: Problem, sets: Sequence[OperandSet], _: int = 0) -> list[Launch]:
    parts, m = _parts(problem), problem.m
    function = FUNCTIONS[parts.activation]
    # One product for all launches: the allocator would give the same memory again.
    product = torch.empty_like(sets[0].d[0, :m])

    def launch(s: OperandSet) -> torch.Tensor:
        gradient = s.d[0, :m]
        torch.mm(s.a[0], s.b[0], out=product)
        function.write_gradient(product, drawn_with(s.aux)[0], None, gradient)
        if parts.activated:
            function.write_value(drawn_with(s.aux)[0], s.d[1])
        if parts.bias_gradient:
            torch.sum(gradient, 0, out=s.d[0, m])
        return s.d[0]

    return [partial(launch, s) for s in sets]


def _gated(problem: Problem, sets: Sequence[OperandSet], _: int = 0) -> list[Launch]:
    # Gate and up are halves of one matrix, as `chunk` gives them.
    n = problem.n
    halves = [(drawn_with(s.aux)[0, :, :n], drawn_with(s.aux)[0, :, n:]) for s in sets]
    return _of_halves(problem, sets, halves)


def _apart(problem: Problem, sets: Sequence[OperandSet], room: int) -> list[Launch]:
    """Eager calls on copies of gate and up, of as many sets as fit in `room` bytes."""
    n, aux = problem.n, drawn_with(sets[0].aux)
    fitting = max(1, room // (aux.numel() * aux.element_size()))
    halves = [
        (drawn_with(s.aux)[0, :, :n].contiguous(), drawn_with(s.aux)[0, :, n:].contiguous())
        for s in sets[:fitting]
    ]
    return _of_halves(problem, sets[:fitting], halves)


def _of_halves(
    problem: Problem,
    sets: Sequence[OperandSet],
    halves: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> list[Launch]:
    """Eager calls with a separate tensor for every output: joining two halves is not timed.

    If the epilogue does not give the activation's value, the forward pass has stored it.
    """
    parts = _parts(problem)
    like = torch.empty((problem.m, problem.n), dtype=sets[0].d.dtype, device=sets[0].d.device)
    product, scaled, gate_gradient, up_gradient, value, activated = (
        torch.empty_like(like) for _ in range(6)
    )
    function = FUNCTIONS[parts.activation]
    if not parts.activated:
        function.write_value(halves[0][0], value)

    def launch(s: OperandSet, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        torch.mm(s.a[0], s.b[0], out=product)
        if parts.activated:
            function.write_value(gate, value)
        torch.mul(product, value, out=up_gradient)
        torch.mul(product, up, out=scaled)
        if parts.activated:
            torch.mul(value, up, out=activated)
        function.write_gradient(scaled, gate, value, gate_gradient)
        return gate_gradient

    return [partial(launch, s, *both) for s, both in zip(sets, halves, strict=True)]


def _compiled(problem: Problem, sets: Sequence[OperandSet], _: int) -> list[Launch]:
    """The whole sequence as one compiled function, which allocates its outputs."""
    parts = _parts(problem)

    def sequence(s: OperandSet) -> tuple[torch.Tensor, ...]:
        aux = drawn_with(s.aux)[0]
        outputs = gradients(parts, torch.mm(s.a[0], s.b[0]), aux)
        if parts.activated:
            outputs = (*outputs, activated(parts, aux))
        return (*outputs, outputs[0].sum(0)) if parts.bias_gradient else outputs

    call = compiled(sequence)
    return [partial(first_of, call, s) for s in sets]
