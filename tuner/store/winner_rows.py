"""A winner as the values of a row, and back.

A row that holds what this program never writes is read as a winner without a candidate, with the
digest `UNREADABLE`. `gemmsmith doctor --deep` reports it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from typing import Any

from gemmsmith.answers.answer import Conditions, Correctness, InRegime, Ratio, Statistics
from gemmsmith.answers.history import Origin
from gemmsmith.core.candidate import Candidate
from gemmsmith.core.config import Use
from gemmsmith.core.device import DeviceModel, Environment
from gemmsmith.core.kernel import AnyKernel
from gemmsmith.core.launch import Launch
from gemmsmith.core.problem import Problem
from tuner.store.codec import from_json, from_json_or_none, to_json
from tuner.store.dictionary import Ids
from tuner.store.models import WinnerRow
from tuner.trial import AgainstRival, OnSpread, Winner, WinnerSignature

UNREADABLE = "unreadable"
"""The digest of a row that cannot be read; no winner has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Record:
    """What is carried along in JSON. The device is as it was measured: drivers differ in what they
    say of one model.
    """

    statistics: Statistics | None
    baseline: Statistics | None
    speedup: Ratio | None
    correctness: Correctness | None
    conditions: Conditions | None
    ties: tuple[str, ...]
    baseline_kernels: tuple[str, ...] = ()
    power_penalty: float | None = None
    regimes: tuple[InRegime, ...] = ()
    device: DeviceModel | None = None
    rivals: tuple[AgainstRival, ...] = ()
    spreads: tuple[OnSpread, ...] = ()


_RECORDED = tuple(field.name for field in fields(_Record))


def references(winner: Winner, ids: Ids) -> dict[str, Any]:
    """The values of a row that name rows of the dictionary."""
    return {
        "problem_id": ids[winner.problem],
        "device_id": ids[winner.device],
        "environment_id": ids[winner.environment],
        "kernel_id": ids[winner.candidate.kernel] if winner.candidate else None,
    }


def columns(winner: Winner, origin: Origin, digest: str) -> dict[str, Any]:
    """The other values of a new row, which is not current yet; its revision is left out."""
    candidate = winner.candidate
    return {
        "launch": to_json(candidate.launch) if candidate else None,
        "sequence": 0,
        "is_current": False,
        "pinned": False,
        "origin": origin.value,
        "digest": digest,
        "use": winner.use.value,
        "median_us": winner.statistics and winner.statistics.median_us,
        "speedup": winner.speedup and winner.speedup.median,
        "record": to_json(_Record(**{name: getattr(winner, name) for name in _RECORDED})),
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
    """The winner of a row, which refers to these entries of the dictionary."""
    nothing = Winner(
        problem=problem,
        device=device,
        environment=environment,
        use=Use.CUBLAS,
        candidate=None,
        statistics=None,
        baseline=None,
        speedup=None,
        correctness=None,
        conditions=None,
        replayed=row.replayed,
        pack=row.pack,
        revision=row.revision,
        promoted_at=row.promoted_at,
        job=row.job,
        stale=stale,
        pinned=row.pinned,
        digest=UNREADABLE,
    )
    if row.kernel_id is not None and kernel is None:
        return nothing
    try:
        launch = None if kernel is None else from_json(Launch, row.launch)
        record = from_json(_Record, row.record)
        return replace(
            nothing,
            **{name: getattr(record, name) for name in _RECORDED if name != "device"},
            device=record.device or device,
            use=Use(row.use),
            candidate=Candidate(kernel=kernel, launch=launch) if kernel and launch else None,
            signature=from_json_or_none(WinnerSignature, row.signature),
            origin=Origin(row.origin),
            digest=row.digest if record.device else "",
        )
    except ValueError:  # msgspec's too
        return nothing
