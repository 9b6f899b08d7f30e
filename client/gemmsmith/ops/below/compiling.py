"""Graphs of `torch.compile` call torch's products where one order of sums is demanded.

Inductor's own kernels for products (Triton's and CUTLASS's templates, sums in loops for one row)
have orders of their own, and its C++ wrapper calls libraries past torch's dispatcher. So a graph
that is compiled meanwhile gets none of these. Inductor's caches tell such graphs from others.
"""

from __future__ import annotations

import copy
from functools import wraps
from typing import Any

import torch

from gemmsmith.errors import NotInvariant
from gemmsmith.ops.engine.in_use import in_use

OPTIONS: dict[str, Any] = {
    "max_autotune_gemm_backends": "ATEN",
    "coordinate_descent_tuning": False,
    "cpp_wrapper": False,
}
"""Options of Inductor. They go before the program's own."""


class _Inductor:
    done = False


def install() -> None:
    """Set these options in every compilation under a demand. Does nothing the second time.

    Raises:
        NotInvariant: this torch begins compilations in another way.
    """
    if _Inductor.done:
        return
    wrapper: Any = getattr(torch, "_TorchCompileInductorWrapper", None)
    if wrapper is None:
        raise NotInvariant("numerics='invariant' does not know this torch's torch.compile")
    original = wrapper.__call__

    @wraps(original)
    def compile_in_order(self: Any, *graph: Any, **named: Any) -> Any:
        engine = in_use()
        if engine is not None and engine.is_invariant:
            self = copy.copy(self)
            self.config = {**self.config, **OPTIONS}
        return original(self, *graph, **named)

    wrapper.__call__ = compile_in_order
    _Inductor.done = True
