"""A winner as the values of a row, and back.

A row with values that this program never writes is read as a winner without a candidate, with the
digest `UNREADABLE`. `gemmsmith doctor --deep` reports it.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from gemmsmith.answers.history import Origin
from gemmsmith.core.candidate import Candidate
from gemmsmith.core.config import Use
from gemmsmith.core.device import DeviceModel, Environment
from gemmsmith.core.kernel import AnyKernel
from gemmsmith.core.launch import Launch
from gemmsmith.core.problem import Problem
from tuner.store.codec import from_json, to_json
from tuner.store.dictionary import Entry
from tuner.store.models import WinnerRow
from tuner.trial import UNREADABLE, Winner

_RECORD = (
    *("statistics", "baseline", "speedup", "correctness", "conditions", "ties"),
    *("baseline_kernels", "power_penalty", "regimes", "device", "rivals", "spreads"),
)
"""The fields in the JSON of `record`, in their order. The device is among them as it was measured:
drivers describe one model differently."""


def references(winner: Winner, ids: Mapping[Entry, int]) -> dict[str, Any]:
    """The columns that refer to rows of the dictionary."""
    return {
        "problem_id": ids[winner.problem],
        "device_id": ids[winner.device],
        "environment_id": ids[winner.environment],
        "kernel_id": ids[winner.candidate.kernel] if winner.candidate else None,
    }


def columns(winner: Winner, origin: Origin, digest: str) -> dict[str, Any]:
    """The other columns of a new row, which is not current yet; without its revision."""
    candidate = winner.candidate
    return {
        "launch": to_json(candidate.launch) if candidate else None,
        "sequence": 0,
        "is_current": False,
        "pinned": False,
        "origin": origin.value,
        "digest": digest,
        "use": winner.use.value,
        "median_us": winner.time_us,
        "speedup": winner.speedup and winner.speedup.median,
        "record": to_json({name: getattr(winner, name) for name in _RECORD}),
        "replayed": winner.replayed,
        "pack": winner.pack,
        "promoted_at": winner.promoted_at or datetime.now(UTC).isoformat(timespec="milliseconds"),
        "job": winner.job,
        "signature": to_json(winner.signature) if winner.signature else None,
    }


def winner_of(
    row: WinnerRow,
    problem: Problem,
    device: DeviceModel,
    environment: Environment,
    kernel: AnyKernel | None,
    *,
    stale: bool,
) -> Winner:
    """The winner of a row, which refers to these entries of the dictionary.

    `kernel` is None if the row has none, or its description cannot be read.
    """
    known: dict[str, Any] = {
        "problem": problem,
        "environment": environment,
        "replayed": row.replayed,
        "pack": row.pack,
        "revision": row.revision,
        "promoted_at": row.promoted_at,
        "job": row.job,
        "stale": stale,
        "pinned": row.pinned,
    }
    candidate = None
    try:
        if row.kernel_id is not None:
            launch = from_json(Launch, row.launch)
            candidate = from_json(Candidate, {"kernel": kernel, "launch": launch})
        record = from_json(dict[str, Any], row.record)
        measured_on = record.get("device")  # None before schema 0005
        decided = {
            "device": measured_on or device,
            "use": row.use,
            "candidate": candidate,
            "signature": row.signature,
            "origin": row.origin,
            "digest": row.digest if measured_on else "",
        }
        # Objects among the values stay as they are: only the JSON is converted.
        return from_json(Winner, record | known | decided)
    except ValueError:  # msgspec's too
        return Winner(
            **known,
            device=device,
            use=Use.CUBLAS,
            candidate=None,
            statistics=None,
            baseline=None,
            speedup=None,
            correctness=None,
            conditions=None,
            digest=UNREADABLE,
        )
