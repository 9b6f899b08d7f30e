"""Copies with other fields, of dataclasses and of msgspec's structs alike."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from msgspec import Struct, structs

T = TypeVar("T")


def replace(value: T, **changes: Any) -> T:
    """`value` with some fields changed."""
    if isinstance(value, Struct):
        return structs.replace(value, **changes)
    return dataclasses.replace(value, **changes)  # type: ignore[type-var]
