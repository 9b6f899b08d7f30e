"""torch's calls for a product with an epilogue.

The default is what eager code runs: the product, with the bias if torch's call adds one, then one
kernel of torch for each further step. The finals time other sequences beside it, and a fused kernel
is recommended only if it beats them all:

* the same code through `torch.compile`, compiled for these sizes (code compiled for several sizes
  is slower than eager code);
* gate and up as two products or two matrices, as programs with two weights have them;
* cuBLASLt's own fusions that an operator of torch reaches: bias and GELU in
  `torch._addmm_activation`, a residual as the matrix that `torch.addmm` adds to, and an FP8 output
  of `torch._scaled_mm`. That one computes no largest value, but a kernel must beat it too. No
  operator reaches DGELU and DGELU_BGRAD, and the backend `cublaslt` has bare products only;
* factors, and what is added after them, by one kernel, `torch.addcmul`.

FP32 factors of rows multiply a 16-bit product with a 16-bit result, without the pass in FP32 of
`linear(x, w) * r[:, None]`. In FP8 they can also be part of `torch._scaled_mm`'s factors of rows.

For an output in FP8, programs compute the 16-bit output first, then read it twice: for its largest
value, and to multiply, clamp and cast it. Eager code does so in the fewest possible passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from gemmsmith.core.activations import ACTIVATIONS, FUNCTIONS, follow
from gemmsmith.core.epilogue import Activation, Epilogue, EpilogueStep, StepKind
from gemmsmith.core.problem import Problem
from gemmsmith.runtime.launch import torch_dtype
from tuner.workloads.fp8_output import LARGEST
from tuner.workloads.scaled import factors, is_taken, scaled_mm
from tuner.workloads.ways import compiled, first_of, on_copies, then
from tuner.workloads.workload import Launch, OperandSet, Way, drawn_with

_BIAS = EpilogueStep(StepKind.ADD, "bias")
_LIBRARYS_GELU = (_BIAS, EpilogueStep(StepKind.APPLY, Activation.GELU_TANH))


def defaults(problem: Problem) -> Sequence[Way]:
    """Eager calls; on bf16 copies if cuBLAS does not take FP8 operands of these extents."""
    operation = problem.operation
    named = partial(_named, operation.epilogue)
    mm = "torch.addmm" if _adds_bias(operation.epilogue) else "torch.mm"
    if not operation.is_scaled:
        return (Way(name=named(mm), launches=_eager),)
    ways = (
        Way(name=named("torch._scaled_mm"), launches=_eager, takes=is_taken),
        Way(name=named(f"{mm} on bf16 copies"), launches=on_copies(_eager, torch.bfloat16)),
    )
    return [_cast_after(way) for way in ways] if operation.stores_fp8 else ways


def alternatives(problem: Problem) -> Sequence[Way]:
    """Sequences that may be faster than eager calls."""
    operation = problem.operation
    steps = operation.epilogue.steps
    if operation.is_scaled and not is_taken(problem):
        return ()
    ways: list[Way] = []
    if following(operation.epilogue) or operation.stores_fp8:
        ways.append(Way.to_beat("torch.compile of the same", _compiled))
    if operation.stores_fp8:
        if steps == (_BIAS,):
            ways.append(Way.to_beat("torch._scaled_mm into FP8, without amax", _into_fp8))
        return ways
    if [step.kind for step in _computing(operation.epilogue)] == [StepKind.MULTIPLY, StepKind.ADD]:
        mm = "torch.addmm" if _adds_bias(operation.epilogue) else "torch.mm"
        call = "torch._scaled_mm" if operation.is_scaled else mm
        ways.append(Way.to_beat(f"{call}, then addcmul", _at_once))
    if operation.is_scaled:
        if operation.epilogue.has_row_scale:
            ways.append(Way.to_beat("torch._scaled_mm with factors of rows", _by_rows))
        return ways
    if steps == _LIBRARYS_GELU:
        ways.append(Way.to_beat("torch._addmm_activation", _by_library))
    if steps == (EpilogueStep(StepKind.ADD, "residual"),):
        ways.append(Way.to_beat("torch.addmm of the residual", _onto_residual))
    if operation.epilogue.is_gated:
        twice = _named(operation.epilogue, "torch.mm twice")
        ways.append(Way.to_beat(twice, _eager_of_two))
        ways.append(Way.to_beat("torch.compile of two products", _compiled_of_two))
    return ways


# What follows the product.


def _adds_bias(epilogue: Epilogue) -> bool:
    """Whether the product's call adds the bias: it comes before everything else."""
    return epilogue.steps[:1] == (_BIAS,)


def following(epilogue: Epilogue) -> list[EpilogueStep]:
    """The steps after the product's call."""
    return list(epilogue.steps[_adds_bias(epilogue) :])


def _computing(epilogue: Epilogue) -> list[EpilogueStep]:
    """Those that need a call: what aux stores is computed there."""
    return [step for step in following(epilogue) if step.kind is not StepKind.STORE]


def _named(epilogue: Epilogue, call: str) -> str:
    """The calls, as recorded results name them."""

    def name(step: EpilogueStep) -> str:
        match step.kind:
            case StepKind.APPLY:
                return FUNCTIONS[step.by].calls[0]
            case StepKind.GATE:
                return f"{FUNCTIONS[step.by].calls[0]} and mul"
            case _:
                return {StepKind.MULTIPLY: "mul", StepKind.ADD: "add"}[step.kind]

    return ", then ".join([call, *map(name, _computing(epilogue))])


def _operand(s: OperandSet, name: str) -> torch.Tensor:
    """A vector of columns [N], a vector of rows [M, 1], or a matrix [M, N]."""
    operand: torch.Tensor = drawn_with(getattr(s, name))[0]
    return operand[0] if len(operand) == 1 and name != "row_scale" else operand


def followed(
    steps: Sequence[EpilogueStep], s: OperandSet, value: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """What the steps make of a product, and what aux stores, in new memory."""
    read = {by: _operand(s, by) for kind, by in steps if kind in (StepKind.MULTIPLY, StepKind.ADD)}
    d, aux = follow(steps, value, read)
    return (d.to(value.dtype), *(() if aux is None else (aux,)))


def _follow(
    steps: Sequence[EpilogueStep],
    s: OperandSet,
    value: torch.Tensor,
    scratch: Sequence[torch.Tensor],
) -> torch.Tensor:
    """As `followed`, by eager calls, each into memory that exists (`_written`)."""
    for index, step in enumerate(steps):
        if step.kind is StepKind.STORE:
            continue
        out = _written(steps[index + 1 :], s, scratch[index])
        match step.kind:
            case StepKind.MULTIPLY:
                torch.mul(value, _operand(s, step.by), out=out)
            case StepKind.ADD:
                torch.add(value, _operand(s, step.by), out=out)
            case StepKind.APPLY:
                FUNCTIONS[step.by].write_value(value, out)
            case StepKind.GATE:
                gate, up = value.chunk(2, -1)
                _write_gated(step.by, gate, up, scratch[index], out)
        value = out
    return value


def _written(left: Sequence[EpilogueStep], s: OperandSet, scratch: torch.Tensor) -> torch.Tensor:
    """Where a call writes its result, by the steps that are left after it."""
    after = _aux(s) if left and left[0].kind is StepKind.STORE else scratch
    return after if left else s.d[0]


def _write_gated(
    activation: str,
    gate: torch.Tensor,
    up: torch.Tensor,
    activated: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    FUNCTIONS[activation].write_value(gate, activated)
    return torch.mul(activated, up, out=out)


# The product, and all of it.


def multiplied(s: OperandSet, out: torch.Tensor | None = None) -> torch.Tensor:
    """A·B with its factors, and with the bias unless factors of rows come before it."""
    a, b = s.a[0], s.b[0]
    bias = None if s.bias is None or s.row_scale is not None else s.bias.view(-1)
    if s.scale_a is not None:
        return scaled_mm(a, b, factors(s), s.d.dtype, out=out, bias=bias)
    return torch.mm(a, b, out=out) if bias is None else torch.addmm(bias, a, b, out=out)


def _eager(problem: Problem, sets: Sequence[OperandSet], _: int = 0) -> list[Launch]:
    """One call after another; the last writes D."""
    steps, like = following(problem.operation.epilogue), sets[0].d[0]
    # The same memory for all launches, as the allocator would give it; aux is stored with D.
    product, *scratch = _scratch(steps, like, like.new_empty(problem.m, problem.n))

    def run(s: OperandSet) -> torch.Tensor:
        return _follow(steps, s, multiplied(s, _written(steps, s, product)), scratch)

    return [partial(run, s) for s in sets]


def _scratch(
    steps: Sequence[EpilogueStep], like: torch.Tensor, product: torch.Tensor
) -> list[torch.Tensor]:
    """Memory of the product and of each step, empty if the result is D or aux."""
    nothing = like.new_empty(0)
    follows = [step.kind for step in steps] + [StepKind.STORE]
    needed = [product if follows[0] is not StepKind.STORE else nothing]
    for step, after in zip(steps, follows[1:], strict=True):
        # A gate needs memory beside its output.
        needs = step.kind is StepKind.GATE or after is not StepKind.STORE
        needed.append(torch.empty_like(like) if needs else nothing)
    return needed


def _aux(s: OperandSet) -> torch.Tensor:
    """aux, which follows D in memory: of a gate [M, 2·I], in the memory of two more D's."""
    return s.d[1:].view(s.d.shape[1], -1)


def _compiled(problem: Problem, sets: Sequence[OperandSet], _: int) -> list[Launch]:
    """The whole sequence as one compiled function, which allocates its outputs."""
    operation = problem.operation
    steps = following(operation.epilogue)

    def sequence(s: OperandSet) -> tuple[torch.Tensor, ...]:
        return followed(steps, s, multiplied(s))

    def into_fp8(s: OperandSet) -> tuple[torch.Tensor, ...]:
        (value,) = followed(steps, s, multiplied(s))
        amax = torch.maximum(drawn_with(s.amax), value.abs().amax())
        scaled = (value * drawn_with(s.scale_d)).clamp(-LARGEST, LARGEST)
        return scaled.to(torch_dtype(operation.d)), amax

    call = compiled(into_fp8 if operation.stores_fp8 else sequence)
    sets = _wide(problem, sets) if operation.stores_fp8 else sets
    return [partial(first_of, call, s) for s in sets]


# Single calls that do more than one step.


def _at_once(problem: Problem, sets: Sequence[OperandSet], _: int) -> list[Launch]:
    """As `_eager`, but one kernel applies the factors and adds."""
    epilogue = problem.operation.epilogue
    scale, added = _computing(epilogue)
    scratch = torch.empty_like(sets[0].d[0])

    def run(s: OperandSet) -> torch.Tensor:
        linear = multiplied(s, _aux(s) if epilogue.stores_aux else scratch)
        return torch.addcmul(_operand(s, added.by), linear, _operand(s, scale.by), out=s.d[0])

    return [partial(run, s) for s in sets]


def _by_rows(_: Problem, sets: Sequence[OperandSet], __: int) -> list[Launch]:
    """One product with factors of rows, which are computed at every launch, as at every step."""

    def run(s: OperandSet, scale_b: torch.Tensor) -> torch.Tensor:
        scales = drawn_with(s.row_scale)[0] * factors(s)[0], scale_b
        bias = None if s.bias is None else s.bias.view(-1)
        return scaled_mm(s.a[0], s.b[0], scales, s.d.dtype, out=s.d[0], bias=bias)

    return [partial(run, s, factors(s)[1].expand(1, s.b.shape[2]).contiguous()) for s in sets]


def _by_library(_: Problem, sets: Sequence[OperandSet], __: int) -> list[Launch]:
    """The library's own epilogue of bias and tanh GELU."""
    addmm = partial(torch._addmm_activation, use_gelu=True)
    return [partial(addmm, _operand(s, "bias"), s.a[0], s.b[0], out=s.d[0]) for s in sets]


def _onto_residual(_: Problem, sets: Sequence[OperandSet], __: int) -> list[Launch]:
    # torch copies the residual into D, and then accumulates the product.
    return [partial(torch.addmm, _operand(s, "residual"), s.a[0], s.b[0], out=s.d[0]) for s in sets]


# Gate and up as two products.


def _eager_of_two(problem: Problem, sets: Sequence[OperandSet], _: int = 0) -> list[Launch]:
    activation, half = problem.operation.epilogue.activation or "", problem.columns
    gate, up, activated = (torch.empty_like(sets[0].d[0]) for _ in range(3))

    def run(s: OperandSet) -> torch.Tensor:
        torch.mm(s.a[0], s.b[0][:, :half], out=gate)
        torch.mm(s.a[0], s.b[0][:, half:], out=up)
        return _write_gated(activation, gate, up, activated, s.d[0])

    return [partial(run, s) for s in sets]


def _compiled_of_two(problem: Problem, sets: Sequence[OperandSet], _: int) -> list[Launch]:
    epilogue, half = problem.operation.epilogue, problem.columns
    activate, stores = ACTIVATIONS[epilogue.activation or ""], epilogue.stores_aux

    def sequence(s: OperandSet) -> tuple[torch.Tensor, ...]:
        gate, up = torch.mm(s.a[0], s.b[0][:, :half]), torch.mm(s.a[0], s.b[0][:, half:])
        return (activate(gate) * up, gate, up) if stores else (activate(gate) * up,)

    # The finals run it beside `_compiled`, whose code must not be discarded.
    call = compiled(sequence, beside_others=True)
    return [partial(first_of, call, s) for s in sets]


# An output in FP8.


def _wide(problem: Problem, sets: Sequence[OperandSet]) -> list[OperandSet]:
    # One 16-bit output for all launches: the allocator would give the same memory again.
    output = torch.empty_like(sets[0].d, dtype=torch_dtype(problem.operation.bias))
    return [replace(s, d=output) for s in sets]


def _cast_after(way: Way) -> Way:
    """The calls for a 16-bit output, followed by eager code that casts it."""

    def launches(problem: Problem, sets: Sequence[OperandSet], room: int) -> list[Launch]:
        wide = _wide(problem, sets)
        scaled = torch.empty_like(wide[0].d)
        # Launches of copies may be fewer than the sets.
        return [
            then(launch, partial(_cast, s, wide[0].d, scaled))
            for launch, s in zip(way.launches(problem, wide, room), sets, strict=False)
        ]

    return replace(way, name=f"{way.name}, then amax, mul, clamp and cast", launches=launches)


def _cast(s: OperandSet, value: torch.Tensor, scaled: torch.Tensor) -> torch.Tensor:
    amax = drawn_with(s.amax)
    torch.maximum(amax, torch.linalg.vector_norm(value, float("inf")), out=amax)
    torch.mul(value, drawn_with(s.scale_d).view(()), out=scaled)
    return s.d.copy_(scaled.clamp_(-LARGEST, LARGEST))[0]


def _into_fp8(_: Problem, sets: Sequence[OperandSet], __: int) -> list[Launch]:
    """The library's own output in FP8."""
    # torch 2.11 does not apply `scale_result` on CUDA, so A's factor and the bias include D's.
    launches: list[Launch] = []
    for s in sets:
        (scale_a, scale_b), scale_d = factors(s), drawn_with(s.scale_d).view(())
        bias = drawn_with(s.bias)
        scaled = (bias * scale_d).to(bias.dtype).view(-1)
        call = partial(scaled_mm, s.a[0], s.b[0], (scale_a * scale_d, scale_b), s.d.dtype)
        launches.append(partial(call, out=s.d[0], bias=scaled))
    return launches
