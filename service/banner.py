"""What `gemmsmith serve` prints when it answers: three commands that work as printed."""

from __future__ import annotations

import shlex

import msgspec

from gemmsmith.problem import Problem
from service.documents import best_url

_DEFAULT = Problem(m=4096, n=4096, k=4096)


def text(url: str, *, lookup: Problem, tuning: Problem) -> str:
    """The banner: a lookup, a tuning job, and that job's events.

    `lookup` should be a problem that has a winner, `tuning` one that the worker's device can do.
    """
    body = shlex.quote(msgspec.json.encode(tuning).decode())
    return "\n".join(
        [
            f"gemmsmith answers on {url}  (documentation: {url}/docs). Try:",
            "",
            f"  curl -s '{url}{best_url(lookup)}'",
            f"  curl -s -H 'Content-Type: application/json' -d {body} {url}/tune",
            f"  curl -sN {url}/jobs/latest/events",
            "",
        ]
    )
