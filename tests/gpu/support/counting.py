"""What a process launches, counted where it is launched."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gemmsmith.ops.engine.plan import Plan, RawPlan

_Run = ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
)
_kept: list[Any] = []
"""The binding may call for as long as the process lives."""


@contextmanager
def launches() -> Iterator[list[Plan]]:
    """The plan of every launch in this process, the binding's of plans that are new to it included.

    Those of replayed graphs are not.
    """
    found: list[Plan] = []
    launch, raw = Plan._launch, Plan.raw

    def counting(plan: Plan, *arguments: Any) -> torch.Tensor:
        out = launch(plan, *arguments)
        found.append(plan)
        return out

    def counted(plan: Plan, dtype: int) -> RawPlan:
        made = raw(plan, dtype)
        run = _Run(made.run)

        def call(*arguments: Any) -> int:
            status = int(run(*arguments))
            if status == 0:
                found.append(plan)
            return status

        _kept.append(_Run(call))
        made.run = ctypes.cast(_kept[-1], ctypes.c_void_p).value
        return made

    Plan._launch, Plan.raw = counting, counted  # type: ignore[method-assign,assignment]
    try:
        yield found
    finally:
        Plan._launch, Plan.raw = launch, raw  # type: ignore[method-assign]
