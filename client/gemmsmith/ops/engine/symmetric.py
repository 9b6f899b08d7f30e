"""Products whose result is symmetric: a kernel computes half of it, and stores each element twice.

A product of a matrix with its own transposed view is known by address and strides. That a matrix
which is multiplied with itself is symmetric, its caller must know (`gemmsmith.newton_schulz`).
Without a winner, and where rows must have the same bits at every M, it is a product like any other.
"""

from __future__ import annotations

import torch

from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.forms import Form
from gemmsmith.ops.engine.operands import present


def is_mirrored(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether b is a's transposed view: the same memory, with rows and columns exchanged."""
    (*batch_a, rows, columns), (*batch_b, depth, width) = a.shape, b.shape
    if (rows, columns, batch_a) != (width, depth, batch_b):
        return False
    (*steps_a, row, column), (*steps_b, down, across) = a.stride(), b.stride()
    lies_alike = (row, column, steps_a) == (across, down, steps_b) and a.dtype is b.dtype
    return lies_alike and a.data_ptr() == b.data_ptr() and a.device == b.device


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
    return engine.run(plan, Form.SYMMETRIC, a, a.mT, operands, (alpha, beta))


def multiplied(
    engine: Engine, form: Form, a: torch.Tensor, b: torch.Tensor
) -> torch.Tensor | None:
    """As `Engine.product`, of half of the elements if these are a matrix and its transposed view."""
    if form is Form.MATMUL and a.dim() == b.dim() >= 2 and is_mirrored(a, b):
        d = symmetric(engine, a)
        if d is not None:
            return d
    return engine.product(form, a, b)
