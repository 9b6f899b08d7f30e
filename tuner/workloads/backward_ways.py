"""What torch programs run for the input gradient of a layer and of the activation before it.

The default is what autograd runs in eager code: `torch.mm`, then torch's backward kernel of the
activation, and a kernel of its own for each further output. Of a gated activation these are two
products and the activation's backward kernel; its value comes from the forward pass, unless the
epilogue gives the value too. The finals time the other sequences beside it: the same code through
`torch.compile`, compiled for these very sizes, and of gated ones the same kernels on a gate and an
up that are matrices of their own, as layers with separate weights have them.

cuBLASLt's DGELU and DGELU_BGRAD are not among them: no operator of torch reaches them, nor does the
backend `cublaslt`, which has bare products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from gemmsmith.core.activations import ACTIVATIONS, through
from gemmsmith.core.epilogue import Activation, Backward
from gemmsmith.core.problem import Problem
from tuner.workloads import fused_ways
from tuner.workloads.workload import Launch, OperandSet, Way, drawn_with

_CALLS = {
    Activation.GELU_TANH: "gelu_backward",
    Activation.GELU: "gelu_backward",
    Activation.SILU: "silu_backward",
    Activation.RELU2: "relu and mul",
}
"""How the record names them."""


def defaults(problem: Problem) -> Sequence[Way]:
    """Eager calls."""
    parts = _parts(problem)
    return (Way(name=_named(parts), launches=_gated if parts.gated else _plain),)


def alternatives(problem: Problem) -> Sequence[Way]:
    """Whatever may beat eager calls."""
    parts = _parts(problem)
    found: list[Way] = []

    def add(name: str, launches: Callable[..., list[Launch]]) -> None:
        found.append(Way(name=name, launches=launches, rival=True, is_to_be_beaten=True))

    add("torch.compile of the same", _compiled)
    if parts.gated:
        add(f"{_named(parts)}, gate and up apart", _apart)
    return found


def _parts(problem: Problem) -> Backward:
    parts = problem.operation.epilogue.backward
    assert parts is not None  # noqa: S101 - the family's
    return parts


def _named(parts: Backward) -> str:
    steps = ["torch.mm", *(["mul twice"] if parts.gated else []), _CALLS[parts.activation]]
    if parts.activated:
        steps.append("the activation" + (" and mul" if parts.gated else ""))
    if parts.bias_gradient:
        steps.append("sum")
    return ", then ".join(steps)


def _backward(
    activation: Activation, dy: torch.Tensor, x: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """The activation's gradient into `out`, by one kernel where torch has one."""
    aten = torch.ops.aten
    match activation:
        case Activation.GELU_TANH:
            aten.gelu_backward.grad_input(dy, x, approximate="tanh", grad_input=out)
        case Activation.GELU:
            aten.gelu_backward.grad_input(dy, x, grad_input=out)
        case Activation.SILU:
            aten.silu_backward.grad_input(dy, x, grad_input=out)
        case _:
            torch.mul(dy, functional.relu(x).mul_(2), out=out)
    return out


def _forward(activation: Activation, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    aten = torch.ops.aten
    match activation:
        case Activation.GELU_TANH:
            aten.gelu.out(x, approximate="tanh", out=out)
        case Activation.GELU:
            aten.gelu.out(x, out=out)
        case Activation.SILU:
            aten.silu.out(x, out=out)
        case _:
            torch.square(functional.relu(x), out=out)
    return out


def _plain(problem: Problem, sets: Sequence[OperandSet], _: int = 0) -> list[Launch]:
    """Call after call into D. The product is one tensor for all launches, as the allocator would
    give it.
    """
    parts, m = _parts(problem), problem.m
    between = torch.empty_like(sets[0].d[0, :m])

    def launch(s: OperandSet) -> torch.Tensor:
        gradient = s.d[0, :m]
        torch.mm(s.a[0], s.b[0], out=between)
        _backward(parts.activation, between, drawn_with(s.aux)[0], gradient)
        if parts.activated:
            _forward(parts.activation, drawn_with(s.aux)[0], s.d[1])
        if parts.bias_gradient:
            torch.sum(gradient, 0, out=s.d[0, m])
        return s.d[0]

    return [partial(launch, s) for s in sets]


def _gated(problem: Problem, sets: Sequence[OperandSet], _: int = 0) -> list[Launch]:
    """On both halves of one matrix, as `chunk` gives them."""
    n = problem.n
    halves = [(drawn_with(s.aux)[0, :, :n], drawn_with(s.aux)[0, :, n:]) for s in sets]
    return _of_halves(problem, sets, halves)


def _apart(problem: Problem, sets: Sequence[OperandSet], room: int) -> list[Launch]:
    """On copies of the halves, of as many sets as fit."""
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
    """Every output a tensor of its own: what joins two halves is not timed.

    The activation's value is stored by the forward pass where the epilogue does not give it.
    """
    parts = _parts(problem)
    like = torch.empty((problem.m, problem.n), dtype=sets[0].d.dtype, device=sets[0].d.device)
    between, scaled, gate_gradient, up_gradient, value, activated = (
        torch.empty_like(like) for _ in range(6)
    )
    stored = None if parts.activated else _forward(parts.activation, halves[0][0], value)

    def launch(s: OperandSet, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        torch.mm(s.a[0], s.b[0], out=between)
        known = _forward(parts.activation, gate, value) if stored is None else stored
        torch.mul(between, known, out=up_gradient)
        torch.mul(between, up, out=scaled)
        if parts.activated:
            torch.mul(known, up, out=activated)
        return _backward(parts.activation, scaled, gate, gate_gradient)

    return [partial(launch, s, *both) for s, both in zip(sets, halves, strict=True)]


def _compiled(problem: Problem, sets: Sequence[OperandSet], _: int) -> list[Launch]:
    """The whole sequence as one compiled function, which allocates what it gives."""
    parts, n = _parts(problem), problem.n

    def plain(a: torch.Tensor, b: torch.Tensor, aux: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = [through(parts.activation, torch.mm(a, b), aux)]
        if parts.activated:
            found.append(ACTIVATIONS[parts.activation](aux))
        if parts.bias_gradient:
            found.append(found[0].sum(0))
        return tuple(found)

    def gated(a: torch.Tensor, b: torch.Tensor, aux: torch.Tensor) -> tuple[torch.Tensor, ...]:
        product, gate, up = torch.mm(a, b), aux[:, :n], aux[:, n:]
        value = ACTIVATIONS[parts.activation](gate)
        found = (through(parts.activation, product * up, gate), product * value)
        return (*found, value * up) if parts.activated else found

    # What was compiled for other problems counts towards the number of times that code may be.
    torch._dynamo.reset()
    # In this process: others would outlive it where a launch ruins its CUDA context.
    compiler = fused_ways.COMPILER
    options: dict[str, Any] | None = {"compile_threads": 1} if compiler == "inductor" else None
    call = torch.compile(
        gated if parts.gated else plain,
        dynamic=False,
        fullgraph=True,
        backend=compiler,
        options=options,
    )

    def launch(s: OperandSet) -> torch.Tensor:
        found: tuple[torch.Tensor, ...] = call(s.a[0], s.b[0], drawn_with(s.aux)[0])
        return found[0]

    return [partial(launch, s) for s in sets]
