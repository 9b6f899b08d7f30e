"""Records what the service of release 0.1 answered, byte for byte, into `answers-0.1.0.json`.

Run with the code of that release, in its own checkout (commit 85661e5), and never again:

    PYTHONPATH=client:. python <this file> <tests/compat/answers-0.1.0.json of the newer checkout>
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import httpx

from gemmsmith.core.config import Use
from gemmsmith.core.problem import DType, Layout, Problem
from tests.support.serving import H200, new_settings, promote, running, trial, winner
from tuner.jobs import Queue
from tuner.store import Store

EXACT = Problem(m=256, n=4096, k=4096)
KNOWN = [
    EXACT,
    Problem(m=512, n=2048, k=1024, batch=4, dtype=DType.FP16, layout=Layout.NT),
    Problem(m=128, n=4096, k=4096, dtype=DType.FP8_E4M3),
]
LOST = Problem(m=8192, n=8192, k=8192)
PROBLEM = {"m": 256, "n": 4096, "k": 4096, "batch": 1, "dtype": "bf16", "layout": "tn"}
REQUESTS: list[tuple[str, str, dict[str, object], object]] = [
    ("GET", "/best", PROBLEM, None),
    ("GET", "/best", {**PROBLEM, "m": 300}, None),
    ("GET", "/best", {**PROBLEM, "m": 8192, "n": 8192, "k": 8192}, None),
    ("GET", "/best", {**PROBLEM, "n": 64, "k": 64}, None),
    ("GET", "/best", {**PROBLEM, "m": 300, "exact": "true"}, None),
    ("POST", "/best:batch", {}, {"problems": [PROBLEM, {**PROBLEM, "m": 300}], "exact": True}),
    ("GET", "/snapshot", {}, None),
    ("GET", "/devices", {}, None),
    ("GET", "/winners/history", {**PROBLEM, "limit": 200}, None),
    ("GET", "/results", {"limit": 200}, None),
    ("POST", "/tune", {}, {**PROBLEM, "m": 77, "effort": "quick", "priority": 0}),
    ("GET", "/jobs", {"limit": 200}, None),
    ("GET", "/jobs/latest", {}, None),
]


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        settings = new_settings(Path(folder))
        winners = [
            replace(winner(problem), price=1.02, baseline_kernels=("nvjet_a",)) for problem in KNOWN
        ]
        promote(settings, *winners, replace(winner(LOST, use=Use.CUBLAS), price=1.1))
        with Store.open(settings.database) as store:
            store.add_pack("c" * 64, "toolchain", [winners[0].candidate.kernel], 1000)
            store.add_trials([trial(EXACT), trial(EXACT, 1)])
            queue = Queue(store)
            queue.enqueue(LOST, device=H200.slug)
            leased = queue.lease("worker-1", [H200.slug])
            leased.complete(1)
        with running(settings) as client:
            agent = {"user-agent": "gemmsmith-client", "accept": "application/json"}
            answers = [_answer(client, agent, *request) for request in REQUESTS]
    Path(sys.argv[1]).write_text(json.dumps(answers, indent=1, ensure_ascii=False) + "\n")
    return 0


def _answer(
    client: httpx.Client, agent: dict[str, str], method: str, path: str, query: dict, body: object
) -> dict[str, object]:
    found = client.request(method, path, params=query, json=body, headers=agent)
    headers = {
        name: found.headers[name] for name in ("content-type", "etag") if name in found.headers
    }
    return {
        "request": {"method": method, "path": path, "query": query, "body": body},
        "status": found.status_code,
        "headers": headers,
        "body": found.text,
    }


if __name__ == "__main__":
    raise SystemExit(main())
