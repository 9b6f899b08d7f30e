"""Copies with changed fields, for dataclasses and for msgspec's structs."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from msgspec import Struct, structs

from gemmsmith.core.kernel import CUTLASS_KERNELS, Kernel

T = TypeVar("T")


def replace(value: T, **changes: Any) -> T:
    """A copy of `value` with changed fields; for a kernel this may include `backend`."""
    if isinstance(value, Kernel) and "backend" in changes:
        kind = CUTLASS_KERNELS[changes.pop("backend")]
        return kind(**{**structs.asdict(value), **changes})  # type: ignore[return-value]
    if isinstance(value, Struct):
        return structs.replace(value, **changes)
    return dataclasses.replace(value, **changes)  # type: ignore[type-var]
