"""Python in the place of torch's own kernel of an operator: below autograd and in every thread.

torch keeps what is put in for as long as the process lives, so it is put in once, and decides at
every call whether it or torch's own computes. It costs a call some microseconds.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

_libraries: dict[str, Any] = {}  # one a kind of device; torch forgets what is dropped


def stand_before(kind: str, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
    """Have `make(original)` called in the place of `aten::name` for `kind` tensors.

    It gets the keys of the call, which `original.call_boxed` takes first, and the operator's
    arguments. What this torch does not have, or gives no way to call, is left as it is. The CPU
    lacks some operators that CUDA has: there `original` is None, for stand-in kernels.
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
        warnings.simplefilter("ignore")  # the override is what is meant
        _libraries[kind].impl(name, make(original), with_keyset=True)


def asking(
    name: str, ask: Callable[..., torch.Tensor | None]
) -> Callable[[Any], Callable[..., torch.Tensor]]:
    """A `make` of `stand_before`: what `ask` gives for the arguments; None: torch's own computes.

    `name` is the operator's, for the error where there is no kernel of torch's.
    """

    def make(original: Any) -> Callable[..., torch.Tensor]:
        def call(keys: Any, *given: Any, **named: Any) -> torch.Tensor:
            found = ask(*given, **named)
            if found is not None:
                return found
            if original is None:
                raise NotImplementedError(f"torch has no {name} for these tensors")
            out: torch.Tensor = original.call_boxed(keys, *given, **named)
            return out

        return call

    return make


def _original(name: str, key: str) -> Any:
    """Torch's own kernel; None where there is none, or no way to call it."""
    get = getattr(torch.library, "get_kernel", None)
    try:
        return None if get is None else get(name, key)
    except RuntimeError:
        return None
