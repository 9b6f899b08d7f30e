"""What sees the products of this process, for a report."""

from __future__ import annotations

import ctypes
from typing import Protocol

import torch

from gemmsmith.ops.engine.forms import Form
from gemmsmith.ops.engine.plan import Plan


class Watcher(Protocol):
    """Sees every product; see `gemmsmith.patch(report=True)`."""

    def saw(
        self, form: Form, a: torch.Tensor, b: torch.Tensor, plan: Plan | None, groups: int
    ) -> None:
        """Called for each product. `plan` is None if torch computes it."""


class Watching:
    """The watcher of this process, if there is any.

    Attributes:
        flag: whether there is any: 0 or 1, for compiled code, at the same address for ever.
    """

    watcher: Watcher | None = None
    flag = ctypes.c_int32(0)


def watch(watcher: Watcher | None) -> Watcher | None:
    """Have `watcher` see every product of any engine. Returns the previous watcher."""
    before, Watching.watcher = Watching.watcher, watcher
    Watching.flag.value = watcher is not None
    return before
