"""Products without factors: bf16, fp16 and TF32, also with D in FP32, and `D += A·B` in FP32.

torch computes them by `torch.mm(out=)`, or `torch.bmm(out=)` for a batch, with its default settings
(reduced-precision reductions allowed, cuBLASLt's own heuristics). FP32 output takes the same calls
with `out_dtype`; accumulation into D takes `torch.addmm` and `torch.baddbmm`. TF32 products are
these calls on FP32 operands with TF32 allowed.

Tolerances of D in bf16 and fp16. Rounding to bf16 (8 significant bits) alone gives an error of at
most 2⁻⁸ = 3.9e-3 for one element and 1.6e-3 for many, rounding to fp16 (11 bits) an eighth of that;
FP32 accumulation adds about 1e-6. The bounds are just above the worst case (5e-3, 1e-3 for fp16),
so that a matrix of a single element passes, and below the error of a mistake: one dropped slice of
64 out of K gives √(64/K), which is 7.8e-3 even for K = 10⁶.

Tolerances of D in FP32, which holds the sums without rounding. bf16 and fp16 products are exact in
FP32. Tensor cores truncate once per 16 terms, always towards zero, so that the errors of a sum that
grows as √K add up to about 2e-9 · K. The bound is 5e-5 plus five times that. Partial sums or a D
rounded to bf16 (1.6e-3) or to fp16 (2e-4 for K up to 10⁴) do not pass.

Tolerances of TF32, which has 11 significant bits of each operand. Tensor cores drop the other bits:
at most 2⁻¹⁰ of an operand, 1.95e-3 of a product of two, 7e-4 of many. The bound is 2e-3; operands
rounded to bf16 give 2.3e-3. Unlike the rounding of D, this error does not shrink if a sum cancels,
so it is relative to at least the norm that the distribution of D predicts.

A D that is accumulated into starts from N(0, 1), and every launch adds the same product. It grows
linearly, and stays finite for more launches than a GPU makes in years.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from gemmsmith.core.operation import Element, Operation
from gemmsmith.core.problem import Problem
from gemmsmith.runtime.abi import Arguments
from tuner.workloads.matrices import (
    draw_matrices,
    exact_product,
    fill,
    packed_arguments,
    unit_scale,
)
from tuner.workloads.ways import copies, mm_name, on_copies, products, tf32, then
from tuner.workloads.workload import (
    Block,
    Drawn,
    Launch,
    Launches,
    OperandSet,
    RandomSource,
    Tolerance,
    Way,
)

_ROUNDED = {  # bounds by type of D; the module's docstring derives them
    Element.BF16: Tolerance(error=5e-3, max_error=1.5e-2),
    Element.F16: Tolerance(error=1e-3, max_error=4e-3),
}
_SUMS = 5e-5
_TF32 = 2e-3
_PER_K = 1e-8


class Dense:
    """bf16, fp16 and TF32 products, also with D in FP32 and added to."""

    def covers(self, operation: Operation) -> bool:
        other = operation.is_scaled or operation.is_grouped or operation.is_fused
        return operation.a.bits >= 16 and not (other or operation.symmetric)

    def draw(self, problem: Problem, count: int, source: RandomSource) -> Drawn:
        """`count` sets of operands; a D that is accumulated into starts from N(0, 1)."""
        scale = unit_scale(problem.k)
        sigma = math.sqrt(problem.k) * scale
        sets, check = draw_matrices(problem, count, source, 1.0, scale)
        if not problem.operation.accumulate:
            return Drawn(sets=sets, check=check, sigma=sigma)
        start = torch.empty_like(check)
        for d in (start, *(s.d for s in sets)):
            fill(d, problem.operation.d, 1.0, source)
        return Drawn(sets=sets, check=check, start=start, sigma=math.hypot(1.0, sigma))

    def arguments(self, problem: Problem, operands: OperandSet, d: torch.Tensor) -> Arguments:
        return packed_arguments(problem, operands, d)

    def precision(self, problem: Problem) -> torch.dtype:
        # FP32 suffices if D is rounded to 16 bits.
        return torch.float32 if problem.operation.d in _ROUNDED else torch.float64

    def product(self, problem: Problem, operands: OperandSet, block: Block) -> torch.Tensor:
        return exact_product(operands, block, self.precision(problem))

    def tolerance(self, problem: Problem, *, fast_accumulation: bool) -> Tolerance:  # noqa: ARG002
        operation = problem.operation
        if operation.d in _ROUNDED:
            return _ROUNDED[operation.d]
        drift = _PER_K * problem.k
        if operation.a is Element.TF32:
            return Tolerance(error=_TF32 + drift, max_error=3 * _TF32 + 4 * drift, floor=1.0)
        return Tolerance(error=_SUMS + drift, max_error=4 * (_SUMS + drift))

    def defaults(self, problem: Problem) -> Sequence[Way]:
        """`torch.mm` and the like; on FP32 copies for an older torch without `out_dtype`."""
        operation, mm = problem.operation, mm_name(problem)
        if operation.a is Element.TF32:
            return (Way(name=f"{mm} with allow_tf32", launches=partial(_allowing, True)),)
        if operation.accumulate:
            add = "torch.baddbmm" if problem.batch > 1 else "torch.addmm"
            return (
                Way(name=f"{add} with out_dtype", launches=_added),
                Way(name=f"{add} on float32 copies", launches=_added_copies),
            )
        if operation.d is Element.F32:
            return (
                Way(name=f"{mm} with out_dtype", launches=_widened),
                Way(name=f"{mm} on float32 copies", launches=on_copies(products, torch.float32)),
            )
        return (Way(name=mm, launches=products),)

    def alternatives(self, problem: Problem) -> Sequence[Way]:
        """The calls of programs that do not use `out_dtype`, or do not allow TF32."""
        operation, mm = problem.operation, mm_name(problem)
        if operation.a is Element.TF32:
            return (Way(name=f"{mm} without allow_tf32", launches=partial(_allowing, False)),)
        if operation.accumulate:
            return (
                # As `main_grad.add_(grad)` does: the product is rounded to 16 bits first.
                Way(name=f"{mm}, then add_", launches=partial(_then, torch.Tensor.add_, products)),
                Way(
                    name=f"{mm} with out_dtype, then add_",
                    launches=partial(_then, torch.Tensor.add_, _widened),
                ),
            )
        if operation.d is Element.F32:
            launches = partial(_then, torch.Tensor.copy_, products)
            return (Way(name=f"{mm}, then float", launches=launches),)
        return ()


def _widened(problem: Problem, sets: Sequence[OperandSet], _: int) -> list[Launch]:
    if problem.batch > 1:
        return [_bind(torch.bmm, s.a, s.b, s.d, out_dtype=torch.float32) for s in sets]
    return [_bind(torch.mm, s.a[0], s.b[0], s.d[0], out_dtype=torch.float32) for s in sets]


def _added(problem: Problem, sets: Sequence[OperandSet], _: int) -> list[Launch]:
    """Accumulation in the library's own kernel, which does not round the product to 16 bits."""
    if problem.batch > 1:
        return [_bind(torch.baddbmm, s.d, s.a, s.b, s.d, out_dtype=torch.float32) for s in sets]
    return [
        _bind(torch.addmm, s.d[0], s.a[0], s.b[0], s.d[0], out_dtype=torch.float32) for s in sets
    ]


def _added_copies(problem: Problem, sets: Sequence[OperandSet], room: int) -> list[Launch]:
    wide = copies(sets, torch.float32, room)
    if problem.batch > 1:
        return [_bind(torch.baddbmm, s.d, s.a, s.b, s.d) for s in wide]
    return [_bind(torch.addmm, s.d[0], s.a[0], s.b[0], s.d[0]) for s in wide]


def _bind(
    call: Callable[..., torch.Tensor], *tensors: torch.Tensor, **keywords: torch.dtype
) -> Launch:
    *operands, out = tensors
    return partial(call, *operands, out=out, **keywords)


def _then(
    step: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    multiply: Launches,
    problem: Problem,
    sets: Sequence[OperandSet],
    room: int,
) -> list[Launch]:
    """Products into one intermediate result, which `step` then writes or adds to D."""
    # `products` rounds to the type of its operands.
    dtype = sets[0].d.dtype if multiply is _widened else sets[0].a.dtype
    product = torch.empty_like(sets[0].d, dtype=dtype)
    launches = multiply(problem, [replace(s, d=product) for s in sets], room)
    steps = zip(launches, sets, strict=True)
    return [then(launch, partial(step, s.d, product)) for launch, s in steps]


def _allowing(allowed: bool, problem: Problem, sets: Sequence[OperandSet], _: int) -> list[Launch]:
    def within(launch: Launch) -> torch.Tensor:
        # At each launch, not around all: the library chooses its kernel in the call.
        with tf32(allowed):
            return launch()

    return [partial(within, launch) for launch in products(problem, sets)]
