"""What torch programs run for a product and what follows it.

The default is what eager code runs: `torch.addmm` with the bias (`torch._scaled_mm` for FP8), which
cuBLASLt adds within its kernel, then a kernel of torch's for each further step. The finals time the
other sequences beside it, and a fused kernel is recommended only where it beats them all: the same
code through `torch.compile`, compiled for these very sizes (code compiled for several is slower
than eager code); cuBLASLt's own fusion of bias and GELU, `torch._addmm_activation`; a residual as
the matrix that `torch.addmm` adds to; factors and what is added after them by one kernel,
`torch.addcmul`. FP32 factors of rows multiply a product of 16 bits without a pass that widens it,
which `linear(x, w) * r[:, None]` takes: the result is written as it is wanted. In FP8 they are also
part of `torch._scaled_mm`'s own factors of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from gemmsmith.core.activations import ACTIVATIONS
from gemmsmith.core.epilogue import Activation
from gemmsmith.core.operation import Epilogue
from gemmsmith.core.problem import Problem
from tuner.workloads.scaled import factors, is_taken
from tuner.workloads.ways import copies
from tuner.workloads.workload import Launch, OperandSet, Way, drawn_with

COMPILER = "inductor"
"""The backend of `torch.compile`; tests on the host name another, which compiles nothing."""

CALLS = {
    Activation.GELU_TANH: "gelu",
    Activation.GELU: "gelu",
    Activation.SILU: "silu",
    Activation.RELU2: "relu and square",
}
"""How the record names them."""


def defaults(problem: Problem) -> Sequence[Way]:
    """Eager calls; of bf16 copies where cuBLAS does not take FP8 of these extents."""
    epilogue = problem.operation.epilogue
    if not problem.operation.is_scaled:
        return (Way(name=_named(_mm_name(epilogue), epilogue), launches=_eager),)
    return (
        Way(name=_named("torch._scaled_mm", epilogue), launches=_eager, takes=is_taken),
        Way(name=_named(f"{_mm_name(epilogue)} on bf16 copies", epilogue), launches=_of_copies),
    )


def alternatives(problem: Problem) -> Sequence[Way]:
    """Whatever may beat eager calls."""
    operation = problem.operation
    epilogue = operation.epilogue
    if operation.is_scaled and not is_taken(problem):
        return ()
    found: list[Way] = []

    def add(name: str, launches: Callable[..., list[Launch]]) -> None:
        found.append(Way(name=name, launches=launches, rival=True, is_to_be_beaten=True))

    if epilogue is not Epilogue.BIAS:  # a single call: there is nothing to compile
        add("torch.compile of the same", _compiled)
    if _multiplies_and_adds(epilogue):
        mm = "torch._scaled_mm" if operation.is_scaled else _mm_name(epilogue)
        add(f"{mm}, then addcmul", _at_once)
    if operation.is_scaled and epilogue.has_row_scale:
        add("torch._scaled_mm with factors of rows", _by_rows)
    if operation.is_scaled:
        return found
    if epilogue is Epilogue.BIAS_GELU_TANH:
        add("torch._addmm_activation", _by_library)
    if epilogue is Epilogue.RESIDUAL:
        add("torch.addmm of the residual", _onto_residual)
    return found


def _mm_name(epilogue: Epilogue) -> str:
    return "torch.addmm" if epilogue.has_bias and not epilogue.has_row_scale else "torch.mm"


def _multiplies_and_adds(epilogue: Epilogue) -> bool:
    """Whether something is added to what factors multiply."""
    return epilogue.has_column_scale or (epilogue.has_row_scale and epilogue.has_bias)


def _named(call: str, epilogue: Epilogue) -> str:
    """The calls, as the record shows them."""
    steps = [call]
    if epilogue.activation is not None:
        steps.append(CALLS[epilogue.activation])
    if epilogue.has_column_scale or epilogue.has_row_scale:
        steps.append("mul")
    if epilogue.has_residual or _multiplies_and_adds(epilogue):
        steps.append("add")
    return ", then ".join(steps)


def multiplied(s: OperandSet, out: torch.Tensor | None = None) -> torch.Tensor:
    """A·B, times its factors, plus a bias that is not added after others."""
    a, b = s.a[0], s.b[0]
    bias = None if s.bias is None or s.row_scale is not None else s.bias.view(-1)
    if s.scale_a is not None:
        scale_a, scale_b = factors(s)
        return torch._scaled_mm(
            a,
            b,
            scale_a=scale_a,
            scale_b=scale_b,
            bias=bias,
            out_dtype=s.d.dtype,
            use_fast_accum=True,
            out=out,
        )
    return torch.mm(a, b, out=out) if bias is None else torch.addmm(bias, a, b, out=out)


def _eager(problem: Problem, sets: Sequence[OperandSet], _: int = 0) -> list[Launch]:
    """Call after call, the last into D. What lies between is the same memory for all launches, as
    the allocator would give it; but aux is kept.
    """
    epilogue = problem.operation.epilogue
    steps = 0 if _ends_linear(epilogue) else 2 if _multiplies_and_adds(epilogue) else 1
    between = [torch.empty_like(sets[0].d[0]) for _ in range(steps)]
    return [partial(_run, epilogue, s, between) for s in sets]


def _ends_linear(epilogue: Epilogue) -> bool:
    follows = epilogue.has_residual or epilogue.has_row_scale
    return epilogue.activation is None and not follows


def _run(epilogue: Epilogue, s: OperandSet, between: Sequence[torch.Tensor]) -> torch.Tensor:
    d = s.d[0]
    if not between:
        return multiplied(s, d)
    linear = multiplied(s, s.d[1] if epilogue.stores_aux else between[0])
    if epilogue.has_row_scale and not epilogue.has_bias:
        return torch.mul(linear, drawn_with(s.row_scale)[0], out=d)
    if _multiplies_and_adds(epilogue):
        scale, added = _multiplied_and_added(s)
        return torch.add(torch.mul(linear, scale, out=between[1]), added, out=d)
    if epilogue.has_residual:
        return torch.add(linear, drawn_with(s.residual)[0], out=d)
    aten = torch.ops.aten
    match epilogue.activation:
        case Activation.GELU_TANH:
            aten.gelu.out(linear, approximate="tanh", out=d)
        case Activation.GELU:
            aten.gelu.out(linear, out=d)
        case Activation.SILU:
            aten.silu.out(linear, out=d)
        case _:
            torch.square(functional.relu(linear), out=d)
    return d


def _multiplied_and_added(s: OperandSet) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors of a linear layer, and what is added after them."""
    if s.row_scale is not None:
        return drawn_with(s.row_scale)[0], drawn_with(s.bias).view(-1)
    return drawn_with(s.column_scale).view(-1), drawn_with(s.residual)[0]


def _at_once(problem: Problem, sets: Sequence[OperandSet], _: int) -> list[Launch]:
    """As `_eager`, but factors and what is added after them by one kernel."""
    stores = problem.operation.epilogue.stores_aux
    between = torch.empty_like(sets[0].d[0])

    def run(s: OperandSet) -> torch.Tensor:
        linear = multiplied(s, s.d[1] if stores else between)
        scale, added = _multiplied_and_added(s)
        return torch.addcmul(added, linear, scale, out=s.d[0])

    return [partial(run, s) for s in sets]


def _by_rows(_: Problem, sets: Sequence[OperandSet], __: int) -> list[Launch]:
    """One product; its factors of rows are computed at every launch, as r is at every step."""

    def run(s: OperandSet, scale_b: torch.Tensor) -> torch.Tensor:
        scale_a, _ = factors(s)
        return torch._scaled_mm(
            s.a[0],
            s.b[0],
            scale_a=drawn_with(s.row_scale)[0] * scale_a,
            scale_b=scale_b,
            bias=None if s.bias is None else s.bias.view(-1),
            out_dtype=s.d.dtype,
            use_fast_accum=True,
            out=s.d[0],
        )

    return [partial(run, s, factors(s)[1].expand(1, s.b.shape[2]).contiguous()) for s in sets]


def _of_copies(problem: Problem, sets: Sequence[OperandSet], room: int) -> list[Launch]:
    """bf16 operands, converted beforehand, without factors."""
    wide = copies(sets, torch.bfloat16, room)
    return _eager(problem, [replace(s, scale_a=None, scale_b=None) for s in wide])


def _compiled(problem: Problem, sets: Sequence[OperandSet], _: int) -> list[Launch]:
    """The whole sequence as one compiled function, which allocates what it gives."""
    epilogue = problem.operation.epilogue
    activate = ACTIVATIONS[epilogue.activation] if epilogue.activation else None

    def sequence(s: OperandSet) -> tuple[torch.Tensor, ...]:
        linear = multiplied(s)
        if _multiplies_and_adds(epilogue):
            scale, added = _multiplied_and_added(s)
            found = (linear * scale + added).to(linear.dtype)
            return (found, linear) if epilogue.stores_aux else (found,)
        if epilogue.has_row_scale:
            return ((linear * drawn_with(s.row_scale)[0]).to(linear.dtype),)
        if epilogue.has_residual:
            return (linear + drawn_with(s.residual)[0],)
        if activate is None:
            return (linear,)
        return (activate(linear), linear) if epilogue.stores_aux else (activate(linear),)

    call = compiled(sequence)
    return [partial(first_of, call, s) for s in sets]


Sequenced = Callable[[OperandSet], tuple[torch.Tensor, ...]]
"""D, and what else a sequence of calls gives."""


def compiled(sequence: Sequenced, *, beside_others: bool = False) -> Sequenced:
    """The same through `torch.compile`, for the sizes that it is called with.

    What was compiled for other problems counts towards the number of times that code may be, so
    all of it is forgotten, unless this runs `beside_others` of the same problem.
    """
    if not beside_others:
        torch._dynamo.reset()
    # In this process: others would outlive it where a launch ruins its CUDA context.
    options: dict[str, Any] | None = {"compile_threads": 1} if COMPILER == "inductor" else None
    call: Sequenced = torch.compile(
        sequence, dynamic=False, fullgraph=True, backend=COMPILER, options=options
    )
    return call


def first_of(call: Sequenced, s: OperandSet) -> torch.Tensor:
    """D of a set, by such a sequence."""
    return call(s)[0]


def _by_library(_: Problem, sets: Sequence[OperandSet], __: int) -> list[Launch]:
    """The library's own epilogue of bias and GELU by tanh."""
    return [
        partial(
            torch._addmm_activation,
            drawn_with(s.bias).view(-1),
            s.a[0],
            s.b[0],
            use_gelu=True,
            out=s.d[0],
        )
        for s in sets
    ]


def _onto_residual(_: Problem, sets: Sequence[OperandSet], __: int) -> list[Launch]:
    """The residual is copied into D, which the product is added to."""
    return [
        partial(torch.addmm, drawn_with(s.residual)[0], s.a[0], s.b[0], out=s.d[0]) for s in sets
    ]
