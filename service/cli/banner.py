"""What `gemmsmith serve` prints when it answers: three commands that work as printed."""

from __future__ import annotations

import shlex

import msgspec
import structlog

from gemmsmith.core.problem import Problem
from service.http.documents import best_url
from service.settings import Settings
from service.worker.gpu import usable_gpu
from tuner.devices.recording import SUFFIX, first_problem
from tuner.errors import RecordingCorrupt
from tuner.store import Store

log = structlog.get_logger("gemmsmith.serve")

FALLBACK = Problem(m=4096, n=4096, k=4096)
"""Asked about while nothing is known: a 404 that says how to tune it."""


def text(
    url: str, *, lookup: Problem, tuning: Problem, device: str | None = None, keys: bool = False
) -> str:
    """The banner: where the pages are, a lookup, a tuning job, and that job's events.

    `lookup` should be a problem that has a winner (on `device`), `tuning` one that the worker's
    device can do. With `keys` the lines take an API key from GEMMSMITH_API_KEY.
    """
    key = ' -H "Authorization: Bearer $GEMMSMITH_API_KEY"' if keys else ""
    body = shlex.quote(msgspec.json.encode(tuning).decode())
    return "\n".join(
        [
            f"gemmsmith answers on {url} (pages: {url}/ui, documentation: {url}/docs). Try:",
            "",
            f"  curl -s{key} '{url}{best_url(lookup, device)}'",
            f"  curl -s{key} -H 'Content-Type: application/json' -d {body} {url}/tune",
            f"  curl -sN{key} {url}/jobs/latest/events",
            "",
        ]
    )


def known_problem(store: Store, device: str | None) -> Problem | None:
    """A problem that has a winner on the device, rather one that a CUTLASS kernel won."""
    winners = store.winners(device=device, limit=200)
    winners.sort(key=lambda winner: winner.use.is_default)
    return winners[0].problem if winners else None


def recorded_problem(settings: Settings) -> Problem | None:
    """A problem that the recorded device holds; None where the worker has a real GPU."""
    if settings.device.startswith("cuda") or (not settings.device and usable_gpu()):
        return None
    for path in sorted(settings.sweeps.glob(f"*{SUFFIX}")):
        try:
            if (problem := first_problem(path)) is not None:
                return problem
        except RecordingCorrupt as error:
            log.warning("recording unusable", error=str(error))
    return None
