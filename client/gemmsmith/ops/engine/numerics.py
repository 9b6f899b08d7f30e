"""Products whose rows have the same bits at every M: what the library demands and refuses.

With `numerics="invariant"` of `gemmsmith.patch` or `gemmsmith.use`, every product of bf16 and fp16,
and of FP8 with factors of rows, runs a kernel of one order of sums, or raises `NotInvariant`.
Torch's own operator, whose order is not known, never takes its place. Sums of integers are exact,
so INT8 runs as usual. Products of FP32 and FP64 are torch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from gemmsmith.core.numerics import invariant
from gemmsmith.errors import InvalidProblem, NotInvariant
from gemmsmith.ops.engine.forms import Form, Shape

_DEMANDED = frozenset({torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2})
"""Types of operands whose products have an order, or raise."""


def is_demanded(a: torch.dtype) -> bool:
    """Whether a product with a left operand of this type runs in one order or not at all."""
    return a in _DEMANDED


def in_order(form: Form, shapes: Sequence[Shape]) -> tuple[Shape, ...]:
    """The ways to run a product, with the order of sums that is demanded.

    Left out are operations that have no order, except those of integers.
    """
    ordered = []
    for shape in shapes:
        problem = shape.problem
        if problem.operation.a.is_integer:
            ordered.append(shape)
            continue
        try:
            operation = invariant(problem.operation, precise=form.is_precise)
        except InvalidProblem:
            continue
        ordered.append(replace(shape, problem=replace(problem, dtype=operation.dtype)))
    return tuple(ordered)


def refusal(form: Form, shapes: Sequence[Shape], sizes: str, reason: str) -> NotInvariant:
    """The error of a product that no kernel of the order runs; says what to do."""
    ordered = in_order(form, shapes)
    if reason:
        return NotInvariant(f"numerics='invariant': {sizes} cannot run: {reason}")
    if not shapes:
        return NotInvariant(
            f"numerics='invariant': no kernel reads the operands of {sizes} as they lie in memory; "
            "call contiguous() on them"
        )
    if not ordered:
        return NotInvariant(
            f"numerics='invariant': {shapes[0].problem} has no order of sums yet; run it outside "
            "the patch, or without numerics"
        )
    # A bias may be added afterwards, so the kernel without one is enough.
    problems = [shape.problem for shape in ordered]
    problem = next((p for p in problems if not p.operation.is_fused), problems[0])
    batch = f" --batch {problem.batch}" if problem.batch > 1 else ""
    return NotInvariant(
        f"numerics='invariant': no compiled kernel for {problem}. Tune it, or another product of "
        f"this operation: gemmsmith tune {problem.m} {problem.n} {problem.k} "
        f"--dtype {problem.dtype} --layout {problem.layout}{batch}"
    )
