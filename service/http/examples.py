"""Examples for the OpenAPI description: what a request says, and what it is answered.

The answer of a lookup is that of a shipped winner, read from its file: no figure is made up.
"""

from __future__ import annotations

import functools
import shlex
from typing import Any
from urllib.parse import urlencode

import msgspec

from gemmsmith.core.problem import Problem
from gemmsmith.core.tuning import Effort, JobState
from service import documents
from tuner import places
from tuner.errors import TunerError
from tuner.exchange import read_winners
from tuner.jobs import Job

ASKED = {
    "m": 4096, "n": 6144, "k": 4096, "batch": 1, "dtype": "bf16", "layout": "tn",
}  # fmt: skip
"""The problem that examples are about."""

BODIES: dict[str, dict[str, Any]] = {
    "POST /best:batch": {"problems": [ASKED], "exact": False},
    "POST /tune": {**ASKED, "effort": "quick", "calls": 96},
    "POST /winners/pin": {**ASKED, "revision": 1},
    "POST /winners/unpin": ASKED,
    "POST /winners/rollback": ASKED,
    "POST /keys": {"name": "training", "scope": "tune"},
}
"""What is sent, by method and path."""

FILTERS: dict[str, dict[str, Any]] = {
    "/jobs": {"state": "failed", "limit": 10},
    "/packs": {"limit": 10},
    "/results": {**ASKED, "phase": "final", "format": "csv"},
    "/winners": {"dtype": "bf16", "min_speedup": 1.1, "format": "csv"},
    "/audit": {"action": "pinned", "limit": 10},
}
"""What a listing is asked for, by path: all of it is left out in most calls."""

_SHIPPED = "configs/winners/nvidia-h200-132sm.bf16.jsonl"
_IN_PATHS = {
    "/jobs/{job_id}": "latest",
    "/kernels/{name}": "cublaslt_bf16_bf16_f32_bf16_tn",
    "/keys/{name}": "training",
    "/packs/{pack_hash}": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
}
_NEEDED = {"m", "n", "k"}


def parameter(path: str, name: str, place: str) -> Any:
    """The example of a parameter of the call at `path`; None where nothing needs one."""
    if place == "path":
        return next((value for start, value in _IN_PATHS.items() if path.startswith(start)), None)
    return ASKED.get(name)


def curl(method: str, path: str, parameters: list[dict[str, Any]], origin: str) -> str:
    """A command that makes the call, with what it cannot do without."""
    for parameter in parameters:
        if parameter["in"] == "path" and "example" in parameter:
            path = path.replace(f"{{{parameter['name']}}}", str(parameter["example"]))
    names = {parameter["name"] for parameter in parameters if parameter["in"] == "query"}
    query = FILTERS.get(path, {})
    if {parameter["name"] for parameter in parameters if parameter.get("required")} >= _NEEDED:
        query = {name: ASKED[name] for name in ASKED if name in names and name != "batch"}
    url = f"{origin}{path}?{urlencode(query)}" if query and method == "get" else origin + path
    flags = [] if method == "get" else ["-X", method.upper()]
    if (body := BODIES.get(f"{method.upper()} {path}")) is not None:
        sent = msgspec.json.encode(body).decode()
        flags += ["-H", shlex.quote("Content-Type: application/json"), "-d", shlex.quote(sent)]
    return " ".join(["curl", "-s", *flags, shlex.quote(url)])


@functools.cache
def answers() -> dict[str, Any]:
    """What is answered where that is worth showing, by method and path; a job's for its states."""
    job = _job()
    examples: dict[str, Any] = {
        "POST /tune": job,
        "GET /jobs/{job_id}": job,
        "GET /healthz": {"status": "ok"},
    }
    if (answer := _answer()) is not None:
        examples["GET /best"] = answer
        examples["POST /best:batch"] = {"answers": [answer]}
    return examples


def _job() -> dict[str, Any]:
    """One that was just requested: nothing of it is measured."""
    return documents.job(
        Job(
            id="0f3c2a9d5b7e4c1e8a6f1d2b3c4d5e6f",
            problem=Problem(**ASKED),  # type: ignore[arg-type]
            effort=Effort.QUICK,
            device="",
            priority=0,
            calls=96,
            expected_saving_us=None,
            state=JobState.WAITING,
            phase="",
            done=0,
            total=0,
            best_us=None,
            best=None,
            error=None,
            attempt=0,
            max_attempts=3,
            created_at=1_795_000_000.0,
            started_at=None,
            finished_at=None,
            cancel_requested=False,
            winner_revision=None,
        )
    )


def _answer() -> dict[str, Any] | None:
    """That of the shipped winner for `ASKED`; None where it is not shipped."""
    from service.lookup.find import as_served  # it needs what this is part of

    try:
        winners = read_winners(places.shipped(_SHIPPED))
    except (OSError, TunerError):
        return None
    asked = Problem(**ASKED)  # type: ignore[arg-type]
    winner = next((winner for winner in winners if winner.problem == asked), None)
    return None if winner is None else documents.answer(as_served(winner, lambda _: None))
