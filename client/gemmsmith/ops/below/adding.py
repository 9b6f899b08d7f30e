"""torch's products that take alpha and beta, or batches with `out_dtype`, by tuned kernels.

`addmm`, `baddbmm` and `bmm` with `out_dtype`: the compiled binding cannot take them over, as
torch's C shim passes no Scalar and does not hold them all. They are few and large in a training
step (a weight's gradient, added to its FP32 sum), so Python may stand before them: it costs some
microseconds a call. Like the binding it is below autograd, in every thread, installed once and
switched on and off.

A kernel adds with alpha and beta of 1 and nothing else; other factors are torch's, as is an addend
that is broadcast or not FP32.

Plain `addmm` of a row is what linear layers with a bias come down to. Python only hands it on to
the binding, which decides and launches as for `mm`; but even so it costs every such layer some
microseconds. So it is put there when there is a winner that adds a bias, and not before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from gemmsmith.ops.below.standing import stand_before
from gemmsmith.ops.engine.engine import Engine, in_use
from gemmsmith.ops.engine.forms import Form

PRODUCTS = (("mm", 2, False), ("bmm", 3, False), ("addmm", 2, True), ("baddbmm", 3, True))
"""torch's operators with `out_dtype`: name, dimensions of the factors, whether it adds."""

Takes = Callable[[torch.Tensor, torch.Tensor], bool]
"""Whether a product of these is replaced."""
Biased = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor | None
]
"""`added + a · b` where what is added is a row, perhaps in `out`; None: torch is to compute it."""


def by_kernel(
    engine: Engine,
    a: torch.Tensor,
    b: torch.Tensor,
    out_dtype: torch.dtype,
    added: torch.Tensor | None = None,
    factors: Mapping[str, Any] | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """`a · b`, or `added + a · b`, in `out_dtype`; None: torch is to compute it.

    Args:
        engine: decides.
        a: [M, K], or a batch.
        b: [K, N], or a batch of as many.
        out_dtype: element type of the result.
        added: what the product is added to; may be `out`.
        factors: alpha and beta, where they are given.
        out: where to write; None: a new tensor.
    """
    if added is None:
        return engine.written(Form.MATMUL, a, b, out_dtype, into=out)
    if added.dtype is not out_dtype or any(value != 1 for value in (factors or {}).values()):
        return None
    return engine.written(Form.ADDED, a, b, out_dtype, into=out, added=added)


class _Active:
    """What is switched on in this process."""

    takes: Takes | None = None
    biased: Biased | None = None
    installed: set[str] = set()  # noqa: RUF012 - one a process


def switch(takes: Takes | None, biased: Biased | None) -> None:
    """Replace what `takes` says by kernels of the engine in use; None: nothing."""
    _Active.takes, _Active.biased = takes, biased


def install_biases(kind: str) -> None:
    """Stand before torch's `addmm` of a row too. Does nothing the second time."""
    key = f"{kind} biases"
    if key not in _Active.installed:
        _Active.installed.add(key)
        for name in ("addmm", "addmm.out"):
            stand_before(kind, name, _before_bias)


def install(kind: str, *, without_mm: bool) -> None:
    """Stand before torch's kernels for `cuda` tensors. Does nothing the second time.

    `without_mm`: the binding has taken over `mm` with `out_dtype`, which an older torch's C shim
    does not hold.

    What this torch does not have is left out. The CPU has none of these operators: there they
    are put in the place of nothing, for stand-in kernels.
    """
    if kind in _Active.installed:
        return
    _Active.installed.add(kind)
    for name, dims, adds in PRODUCTS[1 if without_mm else 0 :]:
        for overload in ("dtype", "dtype_out"):
            full = f"{name}.{overload}"
            stand_before(kind, full, partial(_before, full, dims, adds))


def _before(name: str, dims: int, adds: bool, original: Any) -> Callable[..., torch.Tensor]:
    def call(keys: Any, *given: Any, out: torch.Tensor | None = None, **factors: Any) -> Any:
        engine, takes = in_use(), _Active.takes
        if engine is not None and takes is not None:
            added, (a, b, out_dtype) = (given[0], given[1:]) if adds else (None, given)
            if a.dim() == b.dim() == dims and takes(a, b):
                found = by_kernel(engine, a, b, out_dtype, added, factors, out)
                if found is not None:
                    return found
        if original is None:
            raise NotImplementedError(f"torch has no {name} for these tensors")
        rest = factors if out is None else {**factors, "out": out}
        return original.call_boxed(keys, *given, **rest)

    return call


def _before_bias(original: Any) -> Callable[..., torch.Tensor]:
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
            found = biased(added, a, b, out)
            if found is not None:
                return found
        rest = factors if out is None else {**factors, "out": out}
        return original.call_boxed(keys, added, a, b, **rest)

    return call
