"""Overrides torch's own kernel of an operator by Python: below autograd and in every thread.

torch keeps an override for as long as the process lives. So it is installed once, and decides at
every call whether a kernel of ours or torch's own computes. It costs a call some microseconds.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

_libraries: dict[str, Any] = {}  # by kind of device; torch drops overrides with their library


def override(kind: str, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
    """Have `make(original)` called instead of `aten::name` for `kind` tensors.

    It gets the keys of the call, which `original.call_boxed` takes first, and the operator's
    arguments. Operators that this torch lacks, or cannot call, stay as they are. The CPU lacks some
    operators that CUDA has: there `original` is None, for stand-in kernels.
    """
    packet, _, overload = name.partition(".")
    if not hasattr(getattr(torch.ops.aten, packet, None), overload or "default"):
        return
    key = kind.upper()
    original = _original(f"aten::{name}", key)
    if original is None and kind == "cuda":
        return
    if kind not in _libraries:
        _libraries[kind] = torch.library.Library("aten", "IMPL", key)  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of every override
        _libraries[kind].impl(name, make(original), with_keyset=True)


def asking(
    name: str, ask: Callable[..., torch.Tensor | None]
) -> Callable[[Any], Callable[..., torch.Tensor]]:
    """A `make` of `override`: returns the result of `ask`; if that is None, torch's own.

    `name` is the operator's, for the error if torch has no kernel.
    """

    def make(original: Any) -> Callable[..., torch.Tensor]:
        def call(keys: Any, *arguments: Any, **named: Any) -> torch.Tensor:
            d = ask(*arguments, **named)
            if d is not None:
                return d
            if original is None:
                raise NotImplementedError(f"torch has no {name} for these tensors")
            result: torch.Tensor = original.call_boxed(keys, *arguments, **named)
            return result

        return call

    return make


def _original(name: str, key: str) -> Any:
    """Torch's own kernel. Returns None if torch has no kernel, or no way to call it."""
    get = getattr(torch.library, "get_kernel", None)
    try:
        return None if get is None else get(name, key)
    except RuntimeError:
        return None
