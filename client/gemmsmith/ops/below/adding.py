"""torch's products that take alpha and beta, or batches with `out_dtype`, by tuned kernels.

These are `addmm`, `baddbmm` and `bmm` with `out_dtype`. The compiled binding cannot replace them,
because torch's C shim passes no Scalar and lacks some of them. They are few and large in a training
step (a weight's gradient, added to its FP32 sum), so Python may override them at some microseconds
a call. Like the binding's, the overrides are below autograd, work in every thread, and are
installed once and switched on and off.

A kernel adds with alpha and beta of 1 alone. torch computes with other factors, and with an addend
that is broadcast or not FP32.

Linear layers with a bias become plain `addmm` of a row. Python passes it on to the binding, which
decides and launches as for `mm`. This costs every such layer some microseconds, so `addmm` is only
overridden when a winner adds a bias.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from gemmsmith.core.operation import Epilogue
from gemmsmith.ops.below.overriding import override
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.forms import Form, Spec
from gemmsmith.ops.engine.in_use import in_use
from gemmsmith.ops.engine.operands import present

PRODUCTS = (("mm", 2, False), ("bmm", 3, False), ("addmm", 2, True), ("baddbmm", 3, True))
"""torch's operators with `out_dtype`: name, dimensions of the factors, whether it adds."""

Takes = Callable[[torch.Tensor, torch.Tensor], bool]
"""Whether a product of these is replaced."""
Biased = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor | None
]
"""`added + a · b` for a row, perhaps in `out`. Returns None if torch must compute it."""


def by_kernel(
    engine: Engine,
    a: torch.Tensor,
    b: torch.Tensor,
    out_dtype: torch.dtype,
    added: torch.Tensor | None = None,
    factors: Mapping[str, Any] | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """`a · b`, or `added + a · b`, in `out_dtype`. Returns None if torch must compute it.

    Args:
        engine: decides.
        a: [M, K], or a batch.
        b: [K, N], or a batch of as many.
        out_dtype: element type of the result.
        added: to which the product is added; may be `out`.
        factors: alpha and beta, if the caller passes them.
        out: where to write; by default a new tensor.
    """
    if added is None:
        return engine.product(Form.MATMUL, a, b, present(d=out), out_dtype)
    if added.dtype is not out_dtype or any(value != 1 for value in (factors or {}).values()):
        return None
    return engine.product(Form.ADDED, a, b, present(d=out, c=added), out_dtype)


class _Active:
    """The replacements that are on in this process."""

    takes: Takes | None = None
    biased: Biased | None = None
    installed: set[str] = set()  # noqa: RUF012 - one a process


def switch(takes: Takes | None, biased: Biased | None) -> None:
    """Replace the products that `takes` accepts by kernels of the engine in use."""
    _Active.takes, _Active.biased = takes, biased


def install_biases(kind: str) -> None:
    """Override torch's `addmm` of a row too. Does nothing the second time."""
    key = f"{kind} biases"
    if key not in _Active.installed:
        _Active.installed.add(key)
        for name in ("addmm", "addmm.out"):
            override(kind, name, _over_bias)


def install_sums(kind: str) -> None:
    """Override torch's `baddbmm` too, and `addmm` of everything. Does nothing the second time.

    Torch must not compute their products while rows must have the same bits at every M.
    """
    key = f"{kind} sums"
    install_biases(kind)
    if key not in _Active.installed:
        _Active.installed.add(key)
        for name in ("baddbmm", "baddbmm.out"):
            override(kind, name, _over_bias)


def install(kind: str, *, without_mm: bool) -> None:
    """Override torch's kernels for `cuda` tensors. Does nothing the second time.

    `without_mm`: the binding replaces `mm` with `out_dtype`, which the C shim of an older torch
    lacks.

    Operators that this torch lacks are left out. The CPU has none of these operators: there they
    are new, for stand-in kernels.
    """
    if kind in _Active.installed:
        return
    _Active.installed.add(kind)
    for name, dims, adds in PRODUCTS[1 if without_mm else 0 :]:
        for overload in ("dtype", "dtype_out"):
            full = f"{name}.{overload}"
            override(kind, full, partial(_over, full, dims, adds))


def _over(name: str, dims: int, adds: bool, original: Any) -> Callable[..., torch.Tensor]:
    def call(keys: Any, *operands: Any, out: torch.Tensor | None = None, **factors: Any) -> Any:
        engine, takes = in_use(), _Active.takes
        if engine is not None and takes is not None:
            added, (a, b, out_dtype) = (operands[0], operands[1:]) if adds else (None, operands)
            if a.dim() == b.dim() == dims and takes(a, b):
                d = by_kernel(engine, a, b, out_dtype, added, factors, out)
                if d is not None:
                    return d
                if engine.is_invariant:
                    reason = "kernels add a sum of FP32 with factors of 1"
                    engine.refuse(Form.MATMUL, Spec.of(a), Spec.of(b), out_dtype, reason=reason)
        if original is None:
            raise NotImplementedError(f"torch has no {name} for these tensors")
        rest = factors if out is None else {**factors, "out": out}
        return original.call_boxed(keys, *operands, **rest)

    return call


def _in_order(
    added: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None,
    factors: Mapping[str, Any],
) -> torch.Tensor | None:
    """The sum of a product in one order and of what is added, rounded in between.

    Returns None if rows need not have the same bits at every M.
    """
    engine, takes = in_use(), _Active.takes
    if engine is None or not engine.is_invariant or takes is None or not takes(a, b):
        return None
    if a.dim() != b.dim() or a.shape[-1] != b.shape[-2] or a.dtype is not b.dtype:
        return None  # torch raises
    if _is_row(added, b) and all(value == 1 for value in factors.values()):
        # Its kernel adds the row at every other M.
        plan = engine.plan(Form.MATMUL, a, b, epilogue=Epilogue.BIAS)
        if plan is not None:
            reason = "operands or output do not lie as its kernel needs them"
            engine.refuse(Form.MATMUL, Spec.of(a), Spec.of(b), reason=reason)
    d = engine.product(Form.MATMUL, a, b)
    if d is None:
        return None
    alpha, beta = factors.get("alpha", 1), factors.get("beta", 1)
    if alpha != 1:
        d.mul_(alpha)
    if beta != 0:
        d.add_(added, alpha=beta)
    return d if out is None else out.copy_(d)


def _is_row(added: torch.Tensor, b: torch.Tensor) -> bool:
    is_vector = added.dim() == 1 and b.dim() == 2 and added.shape[0] == b.shape[1]
    return is_vector and added.dtype is b.dtype and added.stride(0) == 1


def _over_bias(original: Any) -> Callable[..., torch.Tensor]:
    def call(
        keys: Any,
        added: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        **factors: Any,
    ) -> Any:
        biased = _Active.biased
        if biased is not None and all(value == 1 for value in factors.values()):
            d = biased(added, a, b, out)
            if d is not None:
                return d
        if (d := _in_order(added, a, b, out, factors)) is not None:
            return d
        rest = factors if out is None else {**factors, "out": out}
        return original.call_boxed(keys, added, a, b, **rest)

    return call
