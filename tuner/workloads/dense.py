"""Products without factors: bf16, fp16 and TF32; D in FP32; `D += A·B` in FP32.

torch runs them through `torch.mm(out=)`, batched ones through `torch.bmm(out=)`, with its default
settings (reduced-precision reductions allowed, cuBLASLt's own heuristics); with FP32 output through
the same calls' `out_dtype`, and into a D that is added to through `torch.addmm` and
`torch.baddbmm`. TF32 products are those calls on FP32 operands with TF32 allowed.

Tolerances of D in bf16 and fp16: rounding to bf16 (8 significant bits) alone gives at most
2⁻⁸ = 3.9e-3 for one element and 1.6e-3 for many, rounding to fp16 (11 bits) an eighth of it; FP32
accumulation adds about 1e-6. The bounds lie just above the worst of that (5e-3, 1e-3 for fp16), so
a matrix of a single element passes, and below what a mistake costs: one dropped slice of 64 out of
K gives √(64/K), 7.8e-3 even for K = 10⁶.

D in FP32 holds the sums as they are. bf16 and fp16 products are exact in FP32; tensor cores cut
off what does not fit once per 16 terms, always towards zero, so that the errors of a sum that
grows as √K add up to about 2e-9 · K. The bound is five times that, above 5e-5: partial sums or a D
that were rounded to bf16 (1.6e-3) or to fp16 (2e-4 for K up to 10⁴) do not pass.

TF32 keeps 11 significant bits of each operand. Tensor cores drop the others: at most 2⁻¹⁰ of either
operand, 1.95e-3 of a product of two, and 7e-4 for many. The bound is 2e-3, where operands rounded
to bf16 give 2.3e-3. Unlike rounding of D the error does not shrink where a sum cancels, so it is
never measured against less than what the distribution of D predicts.

A D that is added to starts from N(0, 1), and every launch adds the same product: it grows linearly,
and stays finite for more launches than a GPU makes in years.
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
from tuner.workloads.ways import copies, mm_name, products, products_of_copies, tf32, then
from tuner.workloads.workload import (
    Block,
    Drawn,
    Launch,
    OperandSet,
    RandomSource,
    Tolerance,
    Way,
)

_ROUNDED = {
    Element.BF16: Tolerance(error=5e-3, max_error=1.5e-2),
    Element.F16: Tolerance(error=1e-3, max_error=4e-3),
}
_SUMS = 5e-5
_TF32 = 2e-3
_PER_K = 1e-8


class Dense:
    """bf16, fp16 and TF32 products, also with D in FP32 and added to."""

    def covers(self, operation: Operation) -> bool:
        """Whether the operation is of this family."""
        plain = not (operation.is_scaled or operation.is_grouped or operation.is_fused)
        return operation.a.bits >= 16 and plain

    def draw(self, problem: Problem, count: int, source: RandomSource) -> Drawn:
        """`count` sets of operands; those that are added to start from N(0, 1)."""
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
        """The C ABI's arguments of a set with output `d`."""
        return packed_arguments(problem, operands, d)

    def precision(self, problem: Problem) -> torch.dtype:
        """FP32 is enough for a D that is rounded to 16 bits."""
        return torch.float32 if problem.operation.d in _ROUNDED else torch.float64

    def product(self, problem: Problem, operands: OperandSet, block: Block) -> torch.Tensor:
        """That block of A·B."""
        return exact_product(operands, block, self.precision(problem))

    def tolerance(self, problem: Problem, *, fast_accumulation: bool) -> Tolerance:  # noqa: ARG002
        """See the module."""
        operation = problem.operation
        if operation.d in _ROUNDED:
            return _ROUNDED[operation.d]
        drift = _PER_K * problem.k
        if operation.a is Element.TF32:
            return Tolerance(error=_TF32 + drift, max_error=3 * _TF32 + 4 * drift, floor=1.0)
        return Tolerance(error=_SUMS + drift, max_error=4 * (_SUMS + drift))

    def defaults(self, problem: Problem) -> Sequence[Way]:
        """`torch.mm` and its kin; for an older torch without `out_dtype`, of FP32 copies."""
        operation, mm = problem.operation, mm_name(problem)
        if operation.a is Element.TF32:
            return (Way(name=f"{mm} with allow_tf32", launches=_in_tf32),)
        if operation.accumulate:
            add = "torch.baddbmm" if problem.batch > 1 else "torch.addmm"
            return (
                Way(name=f"{add} with out_dtype", launches=_added),
                Way(name=f"{add} on float32 copies", launches=_added_copies),
            )
        if operation.d is Element.F32:
            return (
                Way(name=f"{mm} with out_dtype", launches=_widened),
                Way(name=f"{mm} on float32 copies", launches=products_of_copies(torch.float32)),
            )
        return (Way(name=mm, launches=products),)

    def alternatives(self, problem: Problem) -> Sequence[Way]:
        """What programs do that do not know of `out_dtype`, or do not allow TF32."""
        operation, mm = problem.operation, mm_name(problem)
        if operation.a is Element.TF32:
            return (Way(name=f"{mm} without allow_tf32", launches=_in_fp32),)
        if operation.accumulate:
            return (
                Way(name=f"{mm}, then add_", launches=_then_added),
                Way(name=f"{mm} with out_dtype, then add_", launches=_widened_then_added),
            )
        if operation.d is Element.F32:
            return (Way(name=f"{mm}, then float", launches=_then_widened),)
        return ()


def _widened(problem: Problem, sets: Sequence[OperandSet], _: int) -> list[Launch]:
    """FP32 output of 16-bit operands, from the library's own kernel."""
    if problem.batch > 1:
        return [_bind(torch.bmm, s.a, s.b, s.d, out_dtype=torch.float32) for s in sets]
    return [_bind(torch.mm, s.a[0], s.b[0], s.d[0], out_dtype=torch.float32) for s in sets]


def _added(problem: Problem, sets: Sequence[OperandSet], _: int) -> list[Launch]:
    """Beta = 1 in the library's own kernel: the product is never rounded to 16 bits."""
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
    """The call with these operands; the last is `out`."""
    *given, out = tensors
    return partial(call, *given, out=out, **keywords)


def _then_widened(problem: Problem, sets: Sequence[OperandSet], _: int) -> list[Launch]:
    """The 16-bit product, converted."""
    product = torch.empty_like(sets[0].d, dtype=sets[0].a.dtype)
    into = products(problem, [replace(s, d=product) for s in sets])
    return [then(one, partial(s.d.copy_, product)) for one, s in zip(into, sets, strict=True)]


def _then_added(problem: Problem, sets: Sequence[OperandSet], _: int) -> list[Launch]:
    """The product rounded to 16 bits, then added: `main_grad.add_(grad)`."""
    product = torch.empty_like(sets[0].d, dtype=sets[0].a.dtype)
    into = products(problem, [replace(s, d=product) for s in sets])
    return [then(one, partial(s.d.add_, product)) for one, s in zip(into, sets, strict=True)]


def _widened_then_added(problem: Problem, sets: Sequence[OperandSet], room: int) -> list[Launch]:
    product = torch.empty_like(sets[0].d)
    into = _widened(problem, [replace(s, d=product) for s in sets], room)
    return [then(one, partial(s.d.add_, product)) for one, s in zip(into, sets, strict=True)]


def _in_tf32(problem: Problem, sets: Sequence[OperandSet], _: int) -> list[Launch]:
    return [_allowing(True, launch) for launch in products(problem, sets)]


def _in_fp32(problem: Problem, sets: Sequence[OperandSet], _: int) -> list[Launch]:
    return [_allowing(False, launch) for launch in products(problem, sets)]


def _allowing(allowed: bool, launch: Launch) -> Launch:
    """The launch with TF32 allowed, or not: the library chooses its kernel as it is enqueued."""

    def within() -> torch.Tensor:
        with tf32(allowed):
            return launch()

    return within
