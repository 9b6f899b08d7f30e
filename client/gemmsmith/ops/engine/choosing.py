"""The interfaces that an engine works with: the lookup, the packs, and the watcher of products."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from gemmsmith.core.config import Config
from gemmsmith.core.operation import Layout
from gemmsmith.ops.engine.forms import Form
from gemmsmith.ops.engine.plan import Plan


class Chosen(Protocol):
    """A lookup's answer."""

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
        """Returns None if torch's own operator must run."""


@runtime_checkable
class PackSource(Protocol):
    """Holds kernel packs as local files."""

    def path(self, pack_hash: str) -> Path:
        """The checked pack of that hash, which may be fetched first."""


class Watcher(Protocol):
    """Sees every product; see `gemmsmith.patch(report=True)`."""

    def saw(
        self, form: Form, a: torch.Tensor, b: torch.Tensor, plan: Plan | None, groups: int
    ) -> None:
        """Called for each product. `plan` is None if torch computes it."""
