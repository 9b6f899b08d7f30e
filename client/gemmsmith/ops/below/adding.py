"""torch's products that take alpha and beta, or batches with `out_dtype`, by tuned kernels.

These are `addmm`, `baddbmm` and `bmm` with `out_dtype`. The compiled binding cannot replace them,
because torch's C shim passes no Scalar and lacks some of them. They are few and large in a training
step (a weight's gradient, added to its FP32 sum), so Python may override them at some microseconds
a call. Like the binding's, the overrides are below autograd, work in every thread, and are
installed once and switched on and off.

A kernel adds with alpha and beta of 1 alone. torch computes with other factors, and with an addend
that is broadcast or not FP32.

Linear layers with a bias become plain `addmm` of a row. Compiled callers, as torch's own layers,
enter the binding instead of the override in Python (`gs_dispatch_enter`): it decides and launches
as for `mm`. Where this torch does not allow that, the override costs every such layer some
microseconds. So `addmm` is only overridden when a winner adds a bias for the sizes of a layer that
is replaced.

While rows must have the same bits at every M, torch must not compute any of these, nor add in place
or multiply vectors. Then a sum with other factors is added after the product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from gemmsmith.core.operation import Epilogue
from gemmsmith.errors import NotInvariant
from gemmsmith.ops.below.overriding import Enter, override
from gemmsmith.ops.engine.copying import written
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.forms import Form, Spec
from gemmsmith.ops.engine.in_use import in_use
from gemmsmith.ops.engine.operands import present

PRODUCTS = (("mm", 2, False), ("bmm", 3, False), ("addmm", 2, True), ("baddbmm", 3, True))
"""torch's operators with `out_dtype`: name, dimensions of the factors, whether it adds."""

Takes = Callable[[torch.Tensor, torch.Tensor], bool]
"""Whether a product of these is replaced."""


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
    installed: set[str] = set()  # noqa: RUF012 - one a process


def switch(takes: Takes | None) -> None:
    """Replace the products that `takes` accepts by kernels of the engine in use."""
    _Active.takes = takes


def install_biases(kind: str, enter: Enter) -> None:
    """Override torch's `addmm` of a row too. Does nothing the second time."""
    key = f"{kind} biases"
    if key not in _Active.installed:
        _Active.installed.add(key)
        for name in ("addmm", "addmm.out"):
            override(kind, name, _over_bias, enter)


def install_sums(kind: str) -> None:
    """Override all other products too, also of vectors. Does nothing the second time.

    Torch must not compute them while rows must have the same bits at every M.

    Raises:
        NotInvariant: this torch cannot call its own kernel of one of them.
    """
    key = f"{kind} sums"
    if key not in _Active.installed:
        names = [name for name in _SUMS if not override(kind, name, _SUMS[name])]
        if names:
            raise NotInvariant(f"numerics='invariant' cannot replace {names[0]}: update torch")
        _Active.installed.add(key)


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
                if added is not None:
                    d = _in_order(added, a, b, out, factors, out_dtype)
                    if d is not None:
                        return d
        if original is None:
            raise NotImplementedError(f"torch has no {name} for these tensors")
        rest = factors if out is None else {**factors, "out": out}
        return original.call_boxed(keys, *operands, **rest)

    return call


def _replacing(a: torch.Tensor, b: torch.Tensor) -> Engine | None:
    """The engine, if products of these are replaced. Returns None if they do not fit."""
    engine, takes = in_use(), _Active.takes
    if engine is None or takes is None or not takes(a, b):
        return None
    fits = a.dim() == b.dim() and a.shape[-1] == b.shape[-2] and a.dtype is b.dtype
    return engine if fits else None


def _demanding(a: torch.Tensor, b: torch.Tensor) -> Engine | None:
    """As `_replacing`, if the engine must multiply in one order."""
    engine = _replacing(a, b)
    return engine if engine is not None and engine.is_invariant else None


def _in_order(
    added: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None,
    factors: Mapping[str, Any],
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor | None:
    """A row added by the kernel of a product, if a winner does so.

    Else, if rows must have the same bits at every M, the sum of the product and of what is added,
    rounded in between. `added` of one dimension less than the product is added to each of its rows,
    or to each element of a product with a vector.

    Returns None if torch must compute it.
    """
    engine = _replacing(a, b)
    if engine is None:
        return None
    alpha, beta = factors.get("alpha", 1), factors.get("beta", 1)
    row = _row(added, a, b) if alpha == beta == 1 and out_dtype is None else None
    if row is not None and engine.plan(Form.MATMUL, a, b, epilogue=Epilogue.BIAS) is not None:
        d = engine.product(Form.MATMUL, a, b, {"bias": row}, epilogue=Epilogue.BIAS)
        return d if d is None else written(d, out)
    if not engine.is_invariant:
        return None
    d = engine.product(Form.MATMUL, a, b, output=out_dtype)
    if d is None:
        return None
    if alpha != 1:
        d.mul_(alpha)
    if beta != 0:
        d.add_(added, alpha=beta)
    return written(d, out)


def _row(added: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor | None:
    """The row that is added to all rows of a product. Returns None for another addend."""
    if b.dim() != 2 or added.dtype is not b.dtype or added.shape[-1:] != b.shape[1:]:
        return None
    if added.dim() == 2 and added.stride(0) == 0 and added.shape[0] == a.shape[0]:
        added = added[0]
    return added if added.dim() == 1 else None


def _over_bias(original: Any, *, in_place: bool = False) -> Callable[..., torch.Tensor]:
    def call(
        keys: Any,
        added: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        **factors: Any,
    ) -> Any:
        d = _in_order(added, a, b, added if in_place else out, factors)
        if d is not None:
            return d
        rest = factors if out is None else {**factors, "out": out}
        return original.call_boxed(keys, added, a, b, **rest)

    return call


def _over_vector(original: Any, *, in_place: bool = False) -> Callable[..., torch.Tensor]:
    """`addmv`, which `mv` calls: a product with one column."""

    def call(
        keys: Any,
        added: torch.Tensor,
        a: torch.Tensor,
        vector: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        **factors: Any,
    ) -> Any:
        if a.dim() == 2 and vector.dim() == 1:
            column = added.unsqueeze(-1)
            d = _in_order(column, a, vector.unsqueeze(1), None, factors)
            if d is not None:
                return written(d.squeeze(1), added if in_place else out)
        rest = factors if out is None else {**factors, "out": out}
        return original.call_boxed(keys, added, a, vector, **rest)

    return call


def _over_dot(original: Any) -> Callable[..., torch.Tensor]:
    def call(keys: Any, a: torch.Tensor, b: torch.Tensor) -> Any:
        if a.dim() == b.dim() == 1:
            row, column = a.unsqueeze(0), b.unsqueeze(1)
            engine = _demanding(row, column)
            d = None if engine is None else engine.product(Form.MATMUL, row, column)
            if d is not None:
                return d.reshape(())
        return original.call_boxed(keys, a, b)

    return call


def _over_activation(original: Any) -> Callable[..., torch.Tensor]:
    """`_addmm_activation`: the library's own fusion, which no kernel of ours has."""

    def call(keys: Any, added: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **rest: Any) -> Any:
        engine = _demanding(a, b)
        if engine is not None:
            reason = "the library adds an activation; call addmm"
            engine.refuse(Form.MATMUL, Spec.of(a), Spec.of(b), reason=reason)
        return original.call_boxed(keys, added, a, b, **rest)

    return call


_SUMS: dict[str, Callable[[Any], Callable[..., torch.Tensor]]] = {
    "baddbmm": _over_bias,
    "baddbmm.out": _over_bias,
    "addmm_": partial(_over_bias, in_place=True),
    "baddbmm_": partial(_over_bias, in_place=True),
    "addmv": _over_vector,
    "addmv.out": _over_vector,
    "addmv_": partial(_over_vector, in_place=True),
    "dot": _over_dot,
    "vdot": _over_dot,
    "_addmm_activation": _over_activation,
    "_addmm_activation.out": _over_activation,
}
