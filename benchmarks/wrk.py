"""Requests as fast as they are answered: wrk, with a script that lists paths and prints figures.

https://github.com/wg/wrk; Debian's package `wrk`.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CONNECTIONS = 16

_SCRIPT = """
local requests, turn = nil, 0
request = function()
  if not requests then  -- wrk does not know the Host header any earlier
    requests = {}
    for path in io.lines("%s") do requests[#requests + 1] = wrk.format("GET", path) end
  end
  turn = turn %% #requests + 1
  return requests[turn]
end
done = function(summary, latency)
  local errors = summary.errors
  local failed = errors.connect + errors.read + errors.write + errors.status + errors.timeout
  print(string.format('{"requests": %%d, "us": %%d, "p50_us": %%f, "p99_us": %%f, "failed": %%d}',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99), failed))
end
"""


class WrkMissingError(Exception):
    """wrk is not installed."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """The figures of a round, or medians of several."""

    per_second: float
    p50_ms: float
    p99_ms: float

    @classmethod
    def median(cls, rounds: Sequence[Load]) -> Load:
        """Return the median of each figure by itself."""
        return cls(
            per_second=statistics.median(load.per_second for load in rounds),
            p50_ms=statistics.median(load.p50_ms for load in rounds),
            p99_ms=statistics.median(load.p99_ms for load in rounds),
        )


def run(url: str, paths: Sequence[str], seconds: int) -> Load:
    """Run a round: one thread, 16 connections, `paths` in turn.

    Raises:
        WrkMissingError: wrk is not installed; the message says how to install it.
        RuntimeError: a request failed; such a round has no figures.
    """
    if shutil.which("wrk") is None:
        raise WrkMissingError("the load is made by wrk, which is missing here: apt install wrk")
    with tempfile.TemporaryDirectory() as folder:
        listing, script = Path(folder, "paths"), Path(folder, "script.lua")
        listing.write_text("".join(f"{path}\n" for path in paths))
        script.write_text(_SCRIPT % listing)
        command = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{seconds}s", "-s", str(script), url]
        reply = subprocess.run(command, capture_output=True, text=True, check=False)
    if reply.returncode:
        raise RuntimeError(f"wrk ended with {reply.returncode}: {reply.stderr or reply.stdout}")
    figures = json.loads(reply.stdout.splitlines()[-1])
    if figures["failed"] or not figures["requests"]:
        raise RuntimeError(f"{figures['failed']} of {figures['requests']} requests failed at {url}")
    return Load(
        per_second=figures["requests"] / figures["us"] * 1e6,
        p50_ms=figures["p50_us"] / 1e3,
        p99_ms=figures["p99_us"] / 1e3,
    )
