"""The messages to and from the measuring process, and the report.

Messages are JSON lines. The report is a JSON file for each element type, rewritten after each
problem.
"""

from __future__ import annotations

import msgspec

from gemmsmith.answers.answer import Conditions, Ratio, Statistics
from gemmsmith.core.candidate import Candidate
from gemmsmith.core.device import DeviceModel, Environment
from gemmsmith.core.problem import Problem

BASELINE = "cublas"
"""The peer that ratios are relative to; always measured, as the last graph of a round."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Measure these peers on a problem. `reason` says why there is no candidate."""

    problem: Problem
    peers: tuple[str, ...]
    rounds: int
    seed: int
    candidate: Candidate | None = None
    pack: str | None = None
    reason: str = ""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A peer on a problem: its figures, or the `reason` why it has none.

    Attributes:
        ratio: the baseline's time over the peer's, paired by round; above 1 the peer is faster.
        error: relative Frobenius error against FP32.
        tuning_s: wall time of its preparation, with compilation and its own tuning.
    """

    reason: str | None = None
    statistics: Statistics | None = None
    ratio: Ratio | None = None
    error: float | None = None
    tuning_s: float = 0.0
    note: str = ""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """All peers on a problem. `failure` says why nothing could be measured."""

    problem: Problem
    entries: dict[str, Entry] = {}
    conditions: Conditions | None = None
    discarded_rounds: int = 0
    origin: str = ""
    use: str = ""
    """What gemmsmith's winner says callers run: cutlass or cublas."""
    failure: str | None = None


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The measuring process has opened its GPU."""

    device: DeviceModel
    environment: Environment


class Busy(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The process works on `peer`, and sends its next message within `limit_s`."""

    peer: str
    limit_s: float


class Done(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The problem was measured, or could not be (`row.failure`)."""

    row: Row


Message = Ready | Busy | Done


class Report(msgspec.Struct, kw_only=True):
    """The file peers-<dtype>.json. `unavailable` has peers that cannot run here, and why."""

    dtype: str
    suite: str
    recorded_at: str
    seed: int
    rounds: int
    unavailable: dict[str, str] = {}
    device: DeviceModel | None = None
    environment: Environment | None = None
    rows: list[Row] = []
