"""Requests as fast as they are answered: wrk, told by a script what to ask and what to report.

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
  if not requests then  -- not sooner: wrk knows the Host header only by now
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
    """What a round, or the median of several, came to."""

    per_second: float
    p50_ms: float
    p99_ms: float

    @classmethod
    def median(cls, rounds: Sequence[Load]) -> Load:
        """Of each figure by itself."""
        return cls(
            per_second=statistics.median(found.per_second for found in rounds),
            p50_ms=statistics.median(found.p50_ms for found in rounds),
            p99_ms=statistics.median(found.p99_ms for found in rounds),
        )


def run(url: str, paths: Sequence[str], seconds: int) -> Load:
    """One round: one thread, 16 connections, `paths` one after the other.

    Raises:
        WrkMissingError: with how to install it.
        RuntimeError: a request failed or was refused; such a round has no figures.
    """
    if shutil.which("wrk") is None:
        raise WrkMissingError("the load is made by wrk, which is missing here: apt install wrk")
    with tempfile.TemporaryDirectory() as folder:
        asked, script = Path(folder, "paths"), Path(folder, "script.lua")
        asked.write_text("".join(f"{path}\n" for path in paths))
        script.write_text(_SCRIPT % asked)
        command = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{seconds}s", "-s", str(script), url]
        reply = subprocess.run(command, capture_output=True, text=True, check=False)
    if reply.returncode:
        raise RuntimeError(f"wrk ended with {reply.returncode}: {reply.stderr or reply.stdout}")
    found = json.loads(reply.stdout.splitlines()[-1])
    if found["failed"] or not found["requests"]:
        raise RuntimeError(f"{found['failed']} of {found['requests']} requests failed at {url}")
    return Load(
        per_second=found["requests"] / found["us"] * 1e6,
        p50_ms=found["p50_us"] / 1e3,
        p99_ms=found["p99_us"] / 1e3,
    )
