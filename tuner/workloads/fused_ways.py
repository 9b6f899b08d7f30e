"""torch's calls for a product with an epilogue.

The default is what eager code runs: `torch.addmm` with the bias (`torch._scaled_mm` for FP8), which
cuBLASLt adds in its kernel, then one kernel of torch for each further step. The finals time other
sequences beside it, and a fused kernel is recommended only if it beats them all:

* the same code through `torch.compile`, compiled for these sizes (code compiled for several sizes
  is slower than eager code);
* cuBLASLt's own fusion of bias and GELU, `torch._addmm_activation`;
* a residual as the matrix that `torch.addmm` adds to;
* factors, and what is added after them, by one kernel, `torch.addcmul`.

FP32 factors of rows multiply a 16-bit product with a 16-bit result, without the pass in FP32 of
`linear(x, w) * r[:, None]`. In FP8 they can also be part of `torch._scaled_mm`'s factors of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from gemmsmith.core.activations import ACTIVATIONS
from gemmsmith.core.epilogue import Activation
from gemmsmith.core.operation import Epilogue
from gemmsmith.core.problem import Problem
from tuner.workloads.scaled import factors, is_taken, scaled_mm
from tuner.workloads.ways import on_copies
from tuner.workloads.workload import Launch, OperandSet, Way, drawn_with

COMPILER = "inductor"
"""The backend of `torch.compile`. Tests on the host replace it by one that compiles nothing."""

CALLS = {
    Activation.GELU_TANH: "gelu",
    Activation.GELU: "gelu",
    Activation.SILU: "silu",
    Activation.RELU2: "relu and square",
}
"""Names of the calls in recorded results."""


def defaults(problem: Problem) -> Sequence[Way]:
    """Eager calls; on bf16 copies if cuBLAS does not take FP8 operands of these extents."""
    epilogue = problem.operation.epilogue
    if not problem.operation.is_scaled:
        return (Way(name=_named(_mm_name(epilogue), epilogue), launches=_eager),)
    return (
        Way(name=_named("torch._scaled_mm", epilogue), launches=_eager, takes=is_taken),
        Way(
            name=_named(f"{_mm_name(epilogue)} on bf16 copies", epilogue),
            launches=on_copies(_eager, torch.bfloat16),
        ),
    )


def alternatives(problem: Problem) -> Sequence[Way]:
    """Sequences that may be faster than eager calls."""
    operation = problem.operation
    epilogue = operation.epilogue
    if operation.is_scaled and not is_taken(problem):
        return ()
    ways: list[Way] = []
    if epilogue is not Epilogue.BIAS:  # a bias is part of the product's call already
        ways.append(Way.to_beat("torch.compile of the same", _compiled))
    if _multiplies_and_adds(epilogue):
        mm = "torch._scaled_mm" if operation.is_scaled else _mm_name(epilogue)
        ways.append(Way.to_beat(f"{mm}, then addcmul", _at_once))
    if operation.is_scaled and epilogue.has_row_scale:
        ways.append(Way.to_beat("torch._scaled_mm with factors of rows", _by_rows))
    if operation.is_scaled:
        return ways
    if epilogue is Epilogue.BIAS_GELU_TANH:
        ways.append(Way.to_beat("torch._addmm_activation", _by_library))
    if epilogue is Epilogue.RESIDUAL:
        ways.append(Way.to_beat("torch.addmm of the residual", _onto_residual))
    return ways


def _mm_name(epilogue: Epilogue) -> str:
    return "torch.addmm" if epilogue.has_bias and not epilogue.has_row_scale else "torch.mm"


def _multiplies_and_adds(epilogue: Epilogue) -> bool:
    return epilogue.has_column_scale or (epilogue.has_row_scale and epilogue.has_bias)


def _named(call: str, epilogue: Epilogue) -> str:
    """The calls, as recorded results name them."""
    steps = [call]
    if epilogue.activation is not None:
        steps.append(CALLS[epilogue.activation])
    if epilogue.has_column_scale or epilogue.has_row_scale:
        steps.append("mul")
    if epilogue.has_residual or _multiplies_and_adds(epilogue):
        steps.append("add")
    return ", then ".join(steps)


def multiplied(s: OperandSet, out: torch.Tensor | None = None) -> torch.Tensor:
    """A·B with its factors, and with the bias unless factors of rows come before it."""
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
    """One call after another; the last writes D."""
    epilogue = problem.operation.epilogue
    steps = 0 if _ends_linear(epilogue) else 2 if _multiplies_and_adds(epilogue) else 1
    # The same memory for all launches, as the allocator would give it; aux is stored with D.
    scratch = [torch.empty_like(sets[0].d[0]) for _ in range(steps)]
    return [partial(_run, epilogue, s, scratch) for s in sets]


def _ends_linear(epilogue: Epilogue) -> bool:
    follows = epilogue.has_residual or epilogue.has_row_scale
    return epilogue.activation is None and not follows


def _run(epilogue: Epilogue, s: OperandSet, scratch: Sequence[torch.Tensor]) -> torch.Tensor:
    d = s.d[0]
    if not scratch:
        return multiplied(s, d)
    linear = multiplied(s, s.d[1] if epilogue.stores_aux else scratch[0])
    if epilogue.has_row_scale and not epilogue.has_bias:
        return torch.mul(linear, drawn_with(s.row_scale)[0], out=d)
    if _multiplies_and_adds(epilogue):
        scale, added = _multiplied_and_added(s)
        return torch.add(torch.mul(linear, scale, out=scratch[1]), added, out=d)
    if epilogue.has_residual:
        return torch.add(linear, drawn_with(s.residual)[0], out=d)
    return activate(epilogue.activation, linear, d)


def activate(activation: Activation | None, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write the activation's value to `out`, by as few of torch's kernels as eager code takes."""
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


def _multiplied_and_added(s: OperandSet) -> tuple[torch.Tensor, torch.Tensor]:
    if s.row_scale is not None:
        return drawn_with(s.row_scale)[0], drawn_with(s.bias).view(-1)
    return drawn_with(s.column_scale).view(-1), drawn_with(s.residual)[0]


def _at_once(problem: Problem, sets: Sequence[OperandSet], _: int) -> list[Launch]:
    """As `_eager`, but one kernel applies the factors and adds."""
    stores = problem.operation.epilogue.stores_aux
    scratch = torch.empty_like(sets[0].d[0])

    def run(s: OperandSet) -> torch.Tensor:
        linear = multiplied(s, s.d[1] if stores else scratch)
        scale, added = _multiplied_and_added(s)
        return torch.addcmul(added, linear, scale, out=s.d[0])

    return [partial(run, s) for s in sets]


def _by_rows(_: Problem, sets: Sequence[OperandSet], __: int) -> list[Launch]:
    """One product with factors of rows, which are computed at every launch, as at every step."""

    def run(s: OperandSet, scale_b: torch.Tensor) -> torch.Tensor:
        scale_a = drawn_with(s.row_scale)[0] * factors(s)[0]
        bias = None if s.bias is None else s.bias.view(-1)
        return scaled_mm(s.a[0], s.b[0], scale_a, scale_b, s.d[0], bias=bias)

    return [partial(run, s, factors(s)[1].expand(1, s.b.shape[2]).contiguous()) for s in sets]


def _compiled(problem: Problem, sets: Sequence[OperandSet], _: int) -> list[Launch]:
    """The whole sequence as one compiled function, which allocates its outputs."""
    epilogue = problem.operation.epilogue
    function = ACTIVATIONS[epilogue.activation] if epilogue.activation else None

    def sequence(s: OperandSet) -> tuple[torch.Tensor, ...]:
        linear = multiplied(s)
        if _multiplies_and_adds(epilogue):
            scale, added = _multiplied_and_added(s)
            value = (linear * scale + added).to(linear.dtype)
            return (value, linear) if epilogue.stores_aux else (value,)
        if epilogue.has_row_scale:
            return ((linear * drawn_with(s.row_scale)[0]).to(linear.dtype),)
        if epilogue.has_residual:
            return (linear + drawn_with(s.residual)[0],)
        if function is None:
            return (linear,)
        return (function(linear), linear) if epilogue.stores_aux else (function(linear),)

    return compiled(sequence, sets)


def compiled(
    sequence: Callable[[OperandSet], tuple[torch.Tensor, ...]],
    sets: Sequence[OperandSet],
    *,
    beside_others: bool = False,
) -> list[Launch]:
    """Launches of a sequence, which returns D and further outputs, through `torch.compile`."""
    # Dynamo limits how often one function is compiled, so all that was compiled for other problems
    # is discarded first, unless this sequence runs `beside_others` of the same problem.
    if not beside_others:
        torch._dynamo.reset()
    # No compiler processes: they would outlive this one if a launch corrupts its CUDA context.
    options: dict[str, Any] | None = {"compile_threads": 1} if COMPILER == "inductor" else None
    call = torch.compile(sequence, dynamic=False, fullgraph=True, backend=COMPILER, options=options)
    return [partial(_first_of, call, s) for s in sets]


def _first_of(
    call: Callable[[OperandSet], tuple[torch.Tensor, ...]], s: OperandSet
) -> torch.Tensor:
    return call(s)[0]


def _by_library(_: Problem, sets: Sequence[OperandSet], __: int) -> list[Launch]:
    """The library's own epilogue of bias and tanh GELU."""
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
    # torch copies the residual into D, and then accumulates the product.
    return [
        partial(torch.addmm, drawn_with(s.residual)[0], s.a[0], s.b[0], out=s.d[0]) for s in sets
    ]
