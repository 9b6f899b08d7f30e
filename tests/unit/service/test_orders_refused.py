"""A full queue, used-up quotas, deadlines and second tries, over HTTP and by the command."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import Result

from gemmsmith import Busy, Client, InvalidProblem, Rejected
from gemmsmith.core.problem import Problem
from gemmsmith.core.tuning import JobState
from service.settings import Settings
from tests.support.commands import run
from tests.support.present import present
from tests.support.serving import new_settings, running
from tuner.jobs import Queue
from tuner.store import Store
from tuner.store.keys import Scope

BODY = {"n": 64, "k": 64}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return new_settings(tmp_path, queue_limit=2)


@pytest.fixture
def store(settings: Settings) -> Iterator[Store]:
    with Store.open(settings.database) as opened:
        yield opened


@pytest.fixture
def queue(store: Store) -> Queue:
    return Queue(store)


@pytest.fixture
def client(settings: Settings) -> Iterator[httpx.Client]:
    with running(settings) as client:
        yield client


def order(client: httpx.Client, m: int, key: str = "", **fields: object) -> httpx.Response:
    headers = {"Idempotency-Key": key} if key else {}
    return client.post("/tune", json={"m": m, **BODY, **fields}, headers=headers)


def document(result: Result) -> Any:
    """What the command printed; before it is what the service's log says in this process."""
    return json.loads(result.stdout[result.stdout.index("{") :])


def end_one(queue: Queue) -> None:
    work = present(queue.lease("a worker", []))
    work.fail("no such luck", retry=False)


def test_a_full_queue_answers_429_and_when_to_come_again(
    client: httpx.Client, queue: Queue
) -> None:
    first = order(client, 1, key="a").json()
    order(client, 2)
    refused = order(client, 3, key="b")
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "3600", "nothing has ever ended here"
    assert refused.headers["content-type"] == "application/problem+json"
    problem = refused.json()
    assert problem["type"] == "urn:gemmsmith:problem:queue-full"
    assert "2 jobs are waiting" in problem["detail"]
    assert len(queue.list()) == 2
    assert (order(client, 2).status_code, order(client, 1, key="a").json()) == (200, first)
    end_one(queue)
    assert order(client, 3, key="b").status_code == 202
    assert 1 <= int(order(client, 4).headers["retry-after"]) < 60


def test_a_keys_quota_is_its_own_kind_of_429(tmp_path: Path) -> None:
    settings = new_settings(tmp_path, require_keys=True, key_job_limit=2)
    with Store.open(settings.database) as store:
        (_, ann), (_, bob) = (
            store.keys.create("ann", Scope.TUNE),
            store.keys.create("bob", Scope.TUNE, job_limit=1),
        )
    with running(settings) as client:

        def status(secret: str, m: int) -> int:
            client.headers["Authorization"] = f"Bearer {secret}"
            return order(client, m).status_code

        assert [status(ann, m) for m in (1, 2, 3)] == [202, 202, 429]
        assert [status(bob, m) for m in (1, 4, 5)] == [200, 202, 429]
        refused = order(client, 5)
        assert refused.json()["type"] == "urn:gemmsmith:problem:quota-used-up"
        assert "'bob'" in refused.json()["detail"]
        assert 1 <= int(refused.headers["retry-after"]) <= 3600
        assert client.get("/jobs/latest").json()["ordered_by"] == "bob"


def test_a_deadline_is_shown(client: httpx.Client) -> None:
    assert order(client, 1).json()["deadline_at"] is None
    job = order(client, 2, deadline_s=30 * 86_400).json()
    assert job["deadline_at"] > job["created_at"]
    waits = "waits: no worker is alive; start one with gemmsmith worker"
    assert client.get("/jobs/latest").json() == {**job, "waits": waits}


def test_a_waiting_job_says_whether_a_worker_takes_it(client: httpx.Client, store: Store) -> None:
    def waits(job: str) -> str:
        said: str = client.get(f"/jobs/{job}").json().get("waits", "")
        return said

    first = order(client, 1).json()["id"]
    queue = Queue(store)
    bound = queue.enqueue(Problem(m=2, n=64, k=64), device="cuda:7")[0].id
    queue.workers.report("smithy:1:x", ["cuda:0"])
    assert waits(first) == "waits: the worker on smithy runs it next"
    assert waits(bound) == "waits: no worker that is alive takes jobs for cuda:7"
    leased = present(queue.lease("smithy:1:x", ["cuda:0"], ttl_s=60))
    assert leased.job.id == first
    assert waits(first) == ""
    queue.workers.report("smithy:1:x", ["cuda:0", "cuda:7"])
    assert waits(bound) == "waits its turn: the worker on smithy has another job"


@pytest.mark.parametrize("wrong", [0, -1, 30 * 86_400 + 1, 1.5, "60", True])
def test_a_wrong_deadline_is_refused(client: httpx.Client, wrong: object) -> None:
    refused = order(client, 1, deadline_s=wrong)
    assert refused.status_code == 422
    (error,) = refused.json()["errors"]
    assert (error["field"], error["accepted"]) == ("deadline_s", "an integer in 1 … 2592000")
    assert client.get("/jobs").json()["jobs"] == []
    with (
        Client(str(client.base_url), cache_dir=None) as library,
        pytest.raises(InvalidProblem, match="deadline_s must be an integer in 1 … 2592000"),
    ):
        library.tune(1, 64, 64, deadline_s=wrong)  # type: ignore[arg-type]


def test_a_failed_job_is_tried_again(client: httpx.Client, queue: Queue) -> None:
    old = order(client, 1, effort="quick", priority=4, calls=9, deadline_s=500).json()
    retry = f"/jobs/{old['id']}/retry"
    assert "retry" not in old["links"]
    refused = client.post(retry)
    assert (refused.status_code, refused.json()["title"]) == (409, "Nothing to retry")
    end_one(queue)
    failed = client.get(f"/jobs/{old['id']}").json()
    assert failed["links"]["retry"] == {"href": retry, "method": "POST"}
    again = client.post(retry, headers={"Idempotency-Key": "once"})
    new = again.json()
    assert (again.status_code, again.headers["location"]) == (202, f"/jobs/{new['id']}")
    assert new["id"] != old["id"]
    same = ("problem", "effort", "device", "priority", "calls", "expected_saving_us")
    assert {name: new[name] for name in same} == {name: old[name] for name in same}
    repeated = client.post(retry, headers={"Idempotency-Key": "once"})
    assert (repeated.status_code, repeated.json()) == (200, new)
    assert client.post("/jobs/nothing/retry").status_code == 404
    other = order(client, 2, key="used").json()
    reused = client.post(retry, headers={"Idempotency-Key": "used"})
    assert reused.status_code == 422
    client.delete(f"/jobs/{other['id']}")
    assert client.post(f"/jobs/{other['id']}/retry").status_code == 202
    client.delete(f"/jobs/{new['id']}")
    order(client, 3)
    assert client.post(retry).status_code == 429


def test_the_library_waits_for_room(client: httpx.Client, queue: Queue) -> None:
    order(client, 1)
    end_one(queue)  # from now on the service has a rate to go by
    order(client, 2)
    order(client, 3)
    told: list[Busy] = []

    def on_busy(busy: Busy) -> None:
        told.append(busy)
        end_one(queue)

    with Client(str(client.base_url), cache_dir=None) as library:
        began = library.tune(4, 64, 64, deadline_s=600, timeout=60, on_busy=on_busy)
        assert [busy.title for busy in told] == ["The queue is full"]
        assert told[0].retry_after >= 1
        assert began.status.deadline_at is not None
        with pytest.raises(Busy, match="2 jobs are waiting"):
            library.tune(5, 64, 64, timeout=0.5)
        end_one(queue)
        end_one(queue)
        again = began.retry()
        assert again.id != began.id
        with pytest.raises(Rejected, match="only a failed or cancelled one"):
            again.retry()
        assert [job.id for job in library.jobs(limit=1)] == [again.id]
        assert {job.state for job in library.jobs(state="failed")} == {JobState.FAILED}
        assert len([*library.jobs()]) == len(queue.list())


def test_the_command_waits_for_room_and_says_so(
    client: httpx.Client, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    order(client, 1)
    end_one(queue)
    order(client, 2)
    order(client, 3)
    asked = ("tune", 4, 64, 64, "--no-wait", "--deadline", 900, "--url", client.base_url)
    late = run(*asked, "--time-limit", 0, code=1)
    assert "the queue is full" in late.stderr.lower()

    slept = time.sleep

    def sleep(seconds: float) -> None:
        if seconds >= 1.0:
            end_one(queue)
        slept(min(seconds, 0.05))

    monkeypatch.setattr("gemmsmith.http.sending.time.sleep", sleep)
    done = run(*asked)
    assert "the queue is full; asking again in" in done.stderr
    assert queue.list(limit=1)[0].problem == Problem(m=4, n=64, k=64)
    assert queue.list(limit=1)[0].deadline_at is not None


@pytest.mark.parametrize("remote", [True, False])
def test_jobs_by_command(
    settings: Settings, client: httpx.Client, queue: Queue, remote: bool
) -> None:
    where = ["--url", str(client.base_url)] if remote else ["--database", settings.database]

    def jobs(*arguments: str, code: int = 0) -> Result:
        return run("jobs", *arguments, *where, code=code)

    first, second = order(client, 1).json(), order(client, 2, deadline_s=60).json()
    end_one(queue)
    listed = document(jobs("list", "--json"))["jobs"]
    assert [job["id"] for job in listed] == [second["id"], first["id"]]
    failed = jobs("list", "--state", "failed").stdout
    assert first["id"] in failed
    assert second["id"] not in failed
    assert "no such luck" in jobs("show", first["id"]).stdout
    assert second["deadline_at"] in jobs("show", second["id"]).stdout
    assert "cancelled" in jobs("cancel", second["id"]).stdout
    again = document(jobs("retry", first["id"], "--json"))
    assert again["id"] not in (first["id"], second["id"])
    assert again["problem"] == first["problem"]
    assert "is waiting; only" in jobs("retry", again["id"], code=1).stderr
    assert "nothing" in jobs("show", "nothing", code=1).stderr
    wrong = jobs("list", "--state", "lost", code=2).stderr
    assert "waiting, running, done, failed, cancelled" in wrong
