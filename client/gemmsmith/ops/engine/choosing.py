"""What an engine is given: who chooses kernels, who holds them, and who is told of products."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from gemmsmith.core.config import Config
from gemmsmith.core.operation import Layout
from gemmsmith.ops.engine.forms import Form
from gemmsmith.ops.engine.plan import Plan


class Chosen(Protocol):
    """What a lookup says to run."""

    @property
    def config(self) -> Config:
        """Kernel, launch, and the hash of the pack that holds the kernel."""

    @property
    def deterministic(self) -> bool:
        """Whether the order of every sum is fixed."""


class Chooser(Protocol):
    """Says which kernel runs a product, as `gemmsmith.winners.lookup.Lookup` does."""

    def lookup(
        self, dtype: str, layout: Layout, m: int, n: int, k: int, batch: int = 1
    ) -> Chosen | None:
        """The kernel; None means torch's own operator."""


@runtime_checkable
class PackSource(Protocol):
    """Holds kernel packs as local files."""

    def path(self, pack_hash: str) -> Path:
        """The pack of that hash, fetched if need be and checked."""


class Watcher(Protocol):
    """Is told of every product; see `gemmsmith.patch(report=True)`."""

    def saw(
        self, form: Form, a: torch.Tensor, b: torch.Tensor, plan: Plan | None, groups: int
    ) -> None:
        """One product; `plan` is None where torch computes it."""
