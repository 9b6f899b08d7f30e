"""The client library against the real service on a real port, with a real worker."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from gemmsmith import (
    Answer,
    AsyncClient,
    Client,
    JobCancelled,
    JobFailed,
    Match,
    NotTuned,
    Problem,
    Rejected,
    ServiceUnavailable,
    Use,
)
from gemmsmith.core.tuning import JobState
from service.settings import Settings
from tests.support.recordings import best_of, record
from tests.support.serving import H100, H200, new_settings, promote, running, trial, winner
from tuner.store import Store

KNOWN = Problem(m=4096, n=4096, k=4096)
RECORDED = Problem(m=256, n=4096, k=4096)
OTHER = Problem(m=512, n=512, k=512)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    settings = new_settings(tmp_path, device="replay:h200")
    settings.sweeps.mkdir()
    record(settings.sweeps, RECORDED)
    promote(settings, winner(KNOWN), winner(KNOWN, device=H100, us=25.0))
    return settings


@pytest.fixture
def url(settings: Settings) -> Iterator[str]:
    with running(settings) as http:
        yield str(http.base_url).rstrip("/")


@pytest.fixture
def client(url: str, tmp_path: Path) -> Iterator[Client]:
    with Client(url, cache_dir=tmp_path / "cache", retries=1) as found:
        yield found


def test_lookups(client: Client) -> None:
    answer = client.best(4096, 4096, 4096, device=H200.slug)
    assert (answer.match, answer.measured, answer.device) == (Match.EXACT, KNOWN, H200)
    assert client.best(4096, 4096, 4096, device=H200.slug) == answer  # through the ETag
    near = client.best(4096, 4096, 5120, device=H200.slug)
    assert (near.match, near.measured) == (Match.NEAREST, KNOWN)
    assert client.best(4096, 4096, 4096, device=H100.slug).device == H100
    guess = client.best(16, 4096, 640, device=H200.slug)
    assert (guess.match, guess.use) == (Match.PREDICTED, Use.CUBLAS)
    assert guess.predicted_us is not None
    assert (guess.statistics, guess.environment, guess.revision) == (None, None, None)
    assert client.best(16, 4096, 640, device=H200.slug) == guess  # through the ETag
    with pytest.raises(NotTuned) as caught:
        client.best(4096, 4096, 5120, device=H200.slug, exact=True)
    assert caught.value.document["links"]["tune"]["href"] == "/tune"
    with pytest.raises(Rejected, match="device"):
        client.best(1, 1, 1, device="no-such-gpu")
    assert {model.slug for model in client.devices()} >= {H200.slug, H100.slug}


def test_many_lookups(client: Client) -> None:
    problems = [KNOWN, OTHER] + [Problem(m=4096, n=4096, k=4096 + 8 * i) for i in range(1, 300)]
    answers = client.best_many(problems, device=H200.slug, exact=True)
    assert isinstance(answers[0], Answer)
    assert answers[0].problem == KNOWN
    assert all(isinstance(item, NotTuned) for item in answers[1:])
    assert len(answers) == len(problems)
    for _ in range(2):  # the second time, the service has the prediction in memory
        known, other = client.best_many([KNOWN, OTHER], device=H200.slug)
        assert isinstance(known, Answer)
        assert known.match is Match.EXACT
        assert isinstance(other, NotTuned)
        assert other.call == f"client.tune({OTHER.arguments}, device={H200.slug!r})"
        assert client.best(512, 512, 512, device=H200.slug).match is Match.PREDICTED


def test_the_cache_stands_in_when_the_service_is_gone(settings: Settings, tmp_path: Path) -> None:
    with running(settings) as http:
        url = str(http.base_url).rstrip("/")
        with Client(url, cache_dir=tmp_path, retries=0) as client:
            answer = client.best(4096, 4096, 4096)
    with Client(url, cache_dir=tmp_path, retries=0) as client:
        assert client.best(4096, 4096, 4096) == answer
        assert client.last_from_cache
        with pytest.raises(ServiceUnavailable):
            client.best(4096, 4096, 8192)


@contextmanager
def working(settings: Settings) -> Iterator[None]:
    """A worker process, until the queue is empty."""
    worker = subprocess.Popen(
        [sys.executable, "-m", "service.cli", "worker", "--until-idle"],
        env={**os.environ, **settings.environment()},
        stderr=subprocess.PIPE,
    )
    try:
        yield
    finally:
        _, errors = worker.communicate(timeout=60)
    assert worker.returncode == 0, errors.decode()


def test_a_job_is_followed_to_its_winner(client: Client, settings: Settings) -> None:
    job = client.tune(256, 4096, 4096)
    assert client.tune(256, 4096, 4096).id == job.id  # already on its way
    updates = []
    with working(settings):
        answer = job.wait(timeout=120, on_progress=updates.append)
    assert answer.problem == RECORDED
    assert answer.replayed
    assert answer.config is not None
    assert answer.config.kernel == best_of(RECORDED).kernel
    assert job.status.state is JobState.DONE
    assert job.status.winner_revision == answer.revision
    assert {update.phase for update in updates} >= {"screen", "finals"}
    assert updates[-1].best_us is not None
    events = list(client.job(job.id).events())
    assert (events[0].kind, events[-1].kind) == ("created", "finished")
    middle = events[len(events) // 2].id
    assert [e.id for e in client.job(job.id).events(after=middle)] == [
        e.id for e in events if int(e.id) > int(middle)
    ]
    assert list(client.job(job.id).events(after=events[-1].id)) == []
    rows = list(client.results(m=256, n=4096, k=4096, job=job.id))
    assert len(rows) >= 8
    assert any(row["failure"] for row in rows)


def test_a_job_that_cannot_be_done_fails_with_its_reason(client, settings) -> None:
    job = client.tune(512, 512, 512)
    with working(settings), pytest.raises(JobFailed, match="512"):
        job.wait(timeout=120)


def test_a_job_can_be_cancelled(client: Client) -> None:
    job = client.tune(512, 512, 512)
    with pytest.raises(TimeoutError):
        job.wait(timeout=0.2)
    assert job.cancel().state is JobState.CANCELLED
    with pytest.raises(JobCancelled):
        job.wait(timeout=20)


def test_results_come_page_by_page(client: Client, settings: Settings, url: str) -> None:
    with Store.open(settings.database) as store:
        for i in range(12):
            store.add_trial(trial(KNOWN, i))
    assert len(list(client.results())) == 12
    assert len(list(client.results(limit=5))) == 5
    page = httpx.get(f"{url}/results", params={"limit": 5}).json()
    assert [row["id"] for row in client.results(limit=5)] == [row["id"] for row in page["trials"]]
    assert list(client.results(dtype="fp16")) == []
    with pytest.raises(Rejected, match="phase"):
        list(client.results(phase="nonsense"))


def test_asynchronously(url: str, settings: Settings, tmp_path: Path) -> None:
    async def test() -> None:
        async with AsyncClient(url, cache_dir=tmp_path / "cache") as client:
            answers = await client.best_many([KNOWN, OTHER], device=H200.slug, exact=True)
            assert isinstance(answers[0], Answer)
            assert isinstance(answers[1], NotTuned)
            guess = await client.best(512, 512, 512, device=H200.slug)
            assert (guess.match, guess.use) == (Match.PREDICTED, Use.CUBLAS)
            [other] = await client.best_many([OTHER], device=H200.slug)
            assert isinstance(other, NotTuned)
            job = await client.tune(256, 4096, 4096)
            with working(settings):
                answer = await job.wait(timeout=120)
            assert answer.config is not None
            assert answer.config.kernel == best_of(RECORDED).kernel
            kinds = [event.kind async for event in job.events()]
            assert kinds[-1] == "finished"

    asyncio.run(test())
