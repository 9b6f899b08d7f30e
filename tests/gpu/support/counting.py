"""What a process launches, counted where it is launched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gemmsmith.ops.plan import Plan


@contextmanager
def launches() -> Iterator[list[Plan]]:
    """The plan of every launch from Python in this process; those of replayed graphs are not."""
    found: list[Plan] = []
    launch = Plan._launch

    def counting(plan: Plan, *arguments: Any) -> torch.Tensor:
        out = launch(plan, *arguments)
        found.append(plan)
        return out

    Plan._launch = counting  # type: ignore[method-assign,assignment]
    try:
        yield found
    finally:
        Plan._launch = launch  # type: ignore[method-assign]
