"""The one interface that every peer implements, and what a peer is given to work with.

Nothing here needs torch or a GPU: peers import what they need when they are asked to prepare.
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
"""Enqueue the product of operand set `i % sets` on the setting's stream; returns where D is.

D is the set's own `d` where the peer can write there, else memory that stays valid until the same
set is launched again."""


class Unsupported(Exception):
    """The peer cannot do this problem; the message is the plain reason that the table shows."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One problem on the GPU, the same for every peer.

    Attributes:
        stream: torch's current stream while a peer prepares and launches.
        candidate, pack: gemmsmith's winner and its compiled pack; None with the `reason`.
        time_us: median time per launch of a few graph replays, for peers that choose by timing.
        wrong: why a launch's output is not the product (None when it is), judged against FP32.
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
    """A peer prepared for a problem; `note` says what it chose, for the record."""

    launch: Launch
    note: str = ""


class Peer(Protocol):
    """Something that computes matrix products.

    Attributes:
        name: its column in the table.
        limit_s: wall time that preparing one problem may take; its process is killed after that.
    """

    name: str
    limit_s: float

    def available(self) -> str | None:
        """Why it cannot run on this machine; None if it can. Cheap: imports nothing heavy."""

    def prepare(self, setting: Setting) -> Ready:
        """Choose and compile what to run on the problem; may take `limit_s`.

        Raises:
            Unsupported: it does not do this problem.
        """


def missing(*modules: str) -> str | None:
    """A plain reason if one of the modules cannot be found, without importing any of them."""
    from importlib.util import find_spec

    absent = [name for name in modules if find_spec(name) is None]
    return f"not installed: {', '.join(absent)}" if absent else None
