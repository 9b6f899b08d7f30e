"""The interface that every peer implements, and its argument.

Nothing here needs torch or a GPU: peers import what they need in `prepare`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.problem import Problem

if TYPE_CHECKING:
    import torch

    from tuner.measure.graphs import Stream
    from tuner.workloads.operands import Operands

Launch = Callable[[int], "torch.Tensor"]
"""Enqueues the product of operand set `i % sets` on the setting's stream, and returns D.

D is the set's own `d` if the peer can write there, else memory that stays valid until the same set
is launched again."""


class Unsupported(Exception):
    """The peer does not support this problem; the table shows the message."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A problem on the GPU, the same for every peer.

    Attributes:
        stream: torch's current stream while a peer prepares and launches.
        candidate, pack: gemmsmith's candidate and its compiled pack; if None, `reason` says why.
        time_us: median time per launch of a few graph replays, for peers that choose by timing.
        wrong: says why a launch's output is wrong, compared with FP32; None if it is right.
    """

    problem: Problem
    device: DeviceModel
    operands: Operands
    stream: Stream
    candidate: Candidate | None = None
    pack: Path | None = None
    reason: str = ""
    time_us: Callable[[Launch], float]
    wrong: Callable[[Launch], str | None]


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A peer prepared for a problem; `note` says what it chose."""

    launch: Launch
    note: str = ""


class Peer(Protocol):
    """Something that computes matrix products.

    Attributes:
        name: its column in the table.
        limit_s: wall time that `prepare` may take; then its process is killed.
    """

    name: str
    limit_s: float

    def available(self) -> str | None:
        """Say why it cannot run on this machine; None if it can. Imports nothing large."""

    def prepare(self, setting: Setting) -> Ready:
        """Choose and compile a kernel for the problem; this may take `limit_s`.

        Raises:
            Unsupported: it does not support this problem.
        """


def missing(*modules: str) -> str | None:
    """Name the modules that are not installed, without importing any; None if all are."""
    from importlib.util import find_spec

    absent = [name for name in modules if find_spec(name) is None]
    return f"not installed: {', '.join(absent)}" if absent else None
