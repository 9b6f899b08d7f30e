"""Overrides torch's own kernel of an operator by Python: below autograd and in every thread.

torch keeps an override for as long as the process lives. So it is installed once, and decides at
every call whether a kernel of ours or torch's own computes. It costs a call some microseconds.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from gemmsmith.ops.below.blocks import Blocks, Includes, Weights
from gemmsmith.ops.engine.forms import Form, Spec
from gemmsmith.ops.engine.in_use import in_use

ByKernel = Callable[..., torch.Tensor | None]
"""Takes the engine and an operator's arguments. Returns None if torch must compute the result."""

Enter = Callable[[str, Any, Any], None]
"""Has compiled code call something else than an override in Python. Takes the operator's name,
torch's own kernel and the override, as `torch.library.get_kernel` gives them."""

_libraries: dict[str, Any] = {}  # by kind of device; torch drops overrides with their library


def override(
    kind: str, name: str, make: Callable[[Any], Callable[..., Any]], enter: Enter | None = None
) -> bool:
    """Have `make(original)` called instead of `aten::name` for `kind` tensors.

    It gets the keys of the call, which `original.call_boxed` takes first, and the operator's
    arguments. With `enter`, compiled code need not call it. Operators that this torch lacks, or
    cannot call, stay as they are. The CPU lacks some operators that CUDA has: there `original` is
    None, for stand-in kernels.
    """
    packet, _, overload = name.partition(".")
    if not hasattr(getattr(torch.ops.aten, packet, None), overload or "default"):
        return True
    key = kind.upper()
    original = kernel_of(name, kind)
    if original is None and kind == "cuda":
        return False
    if kind not in _libraries:
        _libraries[kind] = torch.library.Library("aten", "IMPL", key)  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of every override
        _libraries[kind].impl(name, make(original), with_keyset=True)
    if enter is not None and original is not None:
        enter(name, original, kernel_of(name, kind))
    return True


class Overrides:
    """Operators of two factors that kernels of the engine in use replace while blocks are open.

    Args:
        by_kernel: by the names of the operators.
        takes: whether the products of two operands are replaced while blocks are open for them.
        includes: as of `Blocks`.
    """

    def __init__(
        self,
        by_kernel: Mapping[str, ByKernel],
        takes: Callable[[torch.Tensor, torch.Tensor], bool],
        includes: Includes | None = None,
    ) -> None:
        self.blocks = Blocks(includes)
        self._by_kernel, self._takes = by_kernel, takes
        self._kinds: set[str] = set()
        self._entered: set[str] = set()  # kinds, too: later where the binding comes later
        self._originals: dict[str, Any] = {}

    def on(
        self, kind: str, only: Weights | None, enter: Enter | None = None
    ) -> AbstractContextManager[None]:
        """Replace them in every thread, until the end of the block.

        Args:
            kind: of the device: `cuda`.
            only: sizes of the weights whose products are replaced; None: all.
            enter: as of `override`.
        """
        if kind not in self._kinds:
            self._kinds.add(kind)
            for name in self._by_kernel:
                override(kind, name, partial(self._made, name))
        if enter is not None and kind not in self._entered:
            self._entered.add(kind)
            for name, original in self._originals.items():
                if original is not None:
                    enter(name, original, kernel_of(name, kind))
        return self.blocks.opened(only)

    def _made(self, name: str, original: Any) -> Callable[..., torch.Tensor]:
        by_kernel = self._by_kernel[name]
        self._originals[name] = original

        def call(
            keys: Any, a: torch.Tensor, b: torch.Tensor, *rest: Any, **named: Any
        ) -> torch.Tensor:
            engine = in_use()
            if engine is not None and self._takes(a, b):
                d = by_kernel(engine, a, b, *rest, **named)
                if d is not None:
                    return d
                if engine.is_invariant:
                    reason = f"no kernel of one order computes {name} of these operands"
                    engine.refuse(Form.MATMUL, Spec.of(a), Spec.of(b), reason=reason)
            if original is None:
                raise NotImplementedError(f"torch has no {name} for these tensors")
            result: torch.Tensor = original.call_boxed(keys, a, b, *rest, **named)
            return result

        return call


def kernel_of(name: str, kind: str) -> Any:
    """The present kernel of `aten::name`. Returns None if torch has none, or cannot call it."""
    get = getattr(torch.library, "get_kernel", None)
    try:
        return None if get is None else get(f"aten::{name}", kind.upper())
    except RuntimeError:
        return None
