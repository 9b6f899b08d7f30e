"""Products whose result is symmetric: a kernel computes half of it, and stores each element twice.

A product of a matrix with its own transposed view is known by storage and strides. That a matrix
which is multiplied with itself is symmetric, its caller must know (`gemmsmith.newton_schulz`).
Without a winner, and where rows must have the same bits at every M, it is a product like any other.
"""

from __future__ import annotations

import torch

from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.forms import Form
from gemmsmith.ops.engine.operands import present
from gemmsmith.program.calls import is_mirrored


def symmetric(
    engine: Engine,
    a: torch.Tensor,
    c: torch.Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
) -> torch.Tensor | None:
    """`alpha · a · aᵀ + beta · c`, a new tensor. Returns None if no winner computes it.

    Args:
        engine: decides.
        a: [..., N, K].
        c: symmetric to the bit, [..., N, N]; may be `a`.
        alpha: factor of the product.
        beta: factor of c.
    """
    if engine.is_invariant:
        return None
    plan = engine.plan(Form.SYMMETRIC, a, a.mT)
    operands = present(c=c)
    if plan is None or not plan.suits(operands):
        return None
    plan.set_factors(alpha, beta)
    return engine.run(plan, Form.SYMMETRIC, a, a.mT, operands)


def multiplied(engine: Engine, form: Form, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor | None:
    """As `Engine.product`; half of the elements if these are a matrix and its transposed view."""
    if form is Form.MATMUL and is_mirrored(a, b):
        d = symmetric(engine, a)
        if d is not None:
            return d
    return engine.product(form, a, b)
