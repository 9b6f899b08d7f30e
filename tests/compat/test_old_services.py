"""The client of now against what the service of release 0.1 answered.

`answers-0.1.0.json` was recorded with the code of commit 85661e5 by `record.py` beside it, and is
never made again. The client must send what that service took, to the letter.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

from gemmsmith import Answer, Client, JobStatus, NotTuned, Problem, Snapshot, Use
from gemmsmith.core.config import Match
from gemmsmith.core.kernel import Backend
from gemmsmith.core.problem import Layout
from gemmsmith.core.tuning import JobState
from tests.unit.client.misbehaving import Misbehaving, Say, misbehaving

RECORDED: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "answers-0.1.0.json").read_text()
)
PACK = "c" * 64


class Replay:
    """A client, and a server that gives the recorded answer to what it asks."""

    def __init__(self, client: Client, server: Misbehaving) -> None:
        self._client = client
        self._server = server

    def __call__(self, position: int, ask: Callable[[Client], Any]) -> Any:
        """What the client makes of the recorded answer at that position to what it asks."""
        kept = RECORDED[position]
        self._server.seen.clear()
        self._server.say(Say(kept["status"], kept["body"].encode(), kept["headers"]))
        try:
            return ask(self._client)
        finally:
            [sent] = self._server.seen
            asked = kept["request"]
            url = urlsplit(sent.path)
            query = {name: str(value) for name, value in asked["query"].items()}
            assert (sent.method, url.path, dict(parse_qsl(url.query))) == (
                asked["method"], asked["path"], query,
            )  # fmt: skip
            assert (json.loads(sent.body) if sent.body else None) == asked["body"]


@pytest.fixture
def replay(tmp_path: Path):
    with misbehaving() as server, Client(server.url, retries=0, cache_dir=tmp_path) as client:
        yield Replay(client, server)


def test_lookups(replay: Replay) -> None:
    exact: Answer = replay(0, lambda client: client.best(256, 4096, 4096))
    assert (exact.match, exact.use, exact.revision) == (Match.EXACT, Use.CUTLASS, 1)
    assert exact.config is not None
    assert exact.config.kernel.backend is Backend.CUTLASS3X
    assert exact.config.pack == PACK
    assert (exact.regimes, exact.baseline_kernels) == ((), ("nvjet_a",))
    assert exact.power_penalty == 1.02, "release 0.1 called it the price"
    near: Answer = replay(1, lambda client: client.best(300, 4096, 4096))
    assert (near.match, near.measured) == (Match.NEAREST, Problem(m=256, n=4096, k=4096))
    lost: Answer = replay(2, lambda client: client.best(8192, 8192, 8192))
    assert (lost.use, lost.speedup is not None) == (Use.CUBLAS, True)
    guessed: Answer = replay(3, lambda client: client.best(256, 64, 64))
    assert (guessed.match, guessed.use, guessed.predicted_us is not None) == (
        Match.PREDICTED, Use.CUBLAS, True,
    )  # fmt: skip
    with pytest.raises(NotTuned):
        replay(4, lambda client: client.best(300, 4096, 4096, exact=True))
    problems = [Problem(m=256, n=4096, k=4096), Problem(m=300, n=4096, k=4096)]
    first, second = replay(5, lambda client: client.best_many(problems, exact=True))
    assert first == exact
    assert isinstance(second, NotTuned)


def test_snapshots(replay: Replay) -> None:
    snapshot: Snapshot = replay(6, lambda client: client.snapshot())
    assert (len(snapshot.rows), snapshot.skipped) == (4, 0)
    choice = snapshot.find(Problem(m=256, n=4096, k=4096))
    assert choice is not None
    assert choice.config.pack == PACK
    assert snapshot.find(Problem(m=8192, n=8192, k=8192)) is None
    fp16 = Problem(m=512, n=2048, k=1024, batch=4, dtype="fp16", layout=Layout.NT)
    assert snapshot.row_for(fp16) is not None


def test_lists_and_jobs(replay: Replay) -> None:
    [device] = replay(7, lambda client: client.devices())
    assert device.slug == "nvidia-h200-132sm"
    problem = Problem(m=256, n=4096, k=4096)
    [revision] = replay(8, lambda client: client.history(problem))
    assert (revision.current, revision.answer.revision) == (True, 1)
    rows = replay(9, lambda client: list(client.results()))
    assert [row["problem"]["m"] for row in rows] == [256, 256]
    job = replay(10, lambda client: client.tune(77, 4096, 4096, effort="quick"))
    assert job.problem == Problem(m=77, n=4096, k=4096)
    jobs: list[JobStatus] = replay(11, lambda client: list(client.jobs()))
    assert [status.state for status in jobs] == [JobState.WAITING, JobState.DONE]
    assert replay(12, lambda client: client.job_status("latest")) == jobs[0]
