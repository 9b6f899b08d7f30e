"""Release 0.1 of the client, as it was shipped, against the service of now.

`gemmsmith-0.1.0.zip` is the folder `client/gemmsmith` of commit 85661e5, and is never made again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gemmsmith import Client, Problem, Use
from gemmsmith.answers.answer import InRegime, Ratio, Regime
from gemmsmith.core.candidate import Candidate
from gemmsmith.core.launch import Algorithm, Launch
from gemmsmith.core.problem import Layout
from service.settings import Settings
from tests.support import fake_nvcc
from tests.support.replacing import replace
from tests.support.serving import H200, new_settings, packs_of, promote, running, trial, winner
from tuner.backends.cublaslt.algorithms import kernel_of
from tuner.jobs import Queue
from tuner.store import Store
from tuner.trial import Winner

HERE = Path(__file__).parent
EXACT = Problem(m=256, n=4096, k=4096)
LIBRARYS = Problem(m=512, n=4096, k=4096)
FP16 = Problem(m=512, n=2048, k=1024, batch=4, dtype="fp16", layout=Layout.NT)
INT8 = Problem(m=256, n=4096, k=4096, dtype="int8")
WIDE = Problem(m=256, n=4096, k=4096, dtype="bf16.out_f32", layout=Layout.NT)
TUNED = Problem(m=77, n=4096, k=4096)
NEW = (INT8, WIDE)
"""Operations that release 0.1 does not know."""


def by_library(problem: Problem) -> Candidate:
    kernel = kernel_of(problem.operation, "sm90")
    assert kernel is not None
    algorithm = Algorithm(library=130100, code="0a" * 64, workspace_bytes=4096)
    return Candidate(kernel=kernel, launch=Launch(algorithm=algorithm))


def won(problem: Problem, *, library: bool = False) -> Winner:
    """A winner with everything that winners of now have; of ours, of the kernel of `EXACT`."""
    ratio = Ratio(median=1.07, ci_low=1.06, ci_high=1.08)
    like = replace(problem, dtype=problem.dtype if problem not in NEW else "bf16")
    found = replace(
        winner(like),
        problem=problem,
        power_penalty=1.02,
        regimes=(InRegime(regime=Regime.BOOST, speedup=ratio, median_us=9.0, default_us=9.9),),
    )
    if library or problem in NEW:
        found = replace(found, candidate=by_library(problem), use=Use.CUBLASLT)
    return found


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    made = new_settings(tmp_path)
    promote(
        made, won(EXACT), won(FP16), won(LIBRARYS, library=True), *(won(problem) for problem in NEW)
    )
    ours, theirs = won(EXACT).candidate, won(LIBRARYS, library=True).candidate
    assert ours is not None
    assert theirs is not None
    (tmp_path / "unit.so").write_text(ours.kernel.name)
    toolchain = fake_nvcc.toolchain(tmp_path / "toolchain")
    pack = packs_of(made).publish(tmp_path / "unit.so", [ours.kernel], toolchain)
    with Store.open(made.database) as store:
        store.add_pack(pack.hash, pack.toolchain, [ours.kernel], 9)
        store.add_pack("a" * 64, "t", [theirs.kernel], 9)
        strange = [replace(trial(EXACT), problem=p, candidate=by_library(p)) for p in NEW]
        # More than a page of them: a page without anything to tell must not seem the last one.
        strange += [replace(strange[0], job=f"job-{number}") for number in range(250)]
        store.add_trials([*strange, trial(EXACT)])
        queue = Queue(store, limit=1000)
        queue.enqueue(EXACT, device=H200.slug)
        for problem in NEW:
            queue.enqueue(problem, device=H200.slug)
    return made


@contextmanager
def a_worker(settings: Settings) -> Iterator[None]:
    """Finishes the job for TUNED, as a worker with a GPU would."""
    stop = threading.Event()

    def work() -> None:
        with Store.open(settings.database) as store:
            queue = Queue(store)
            while not stop.wait(0.05):
                jobs = [job for job in queue.list() if job.problem == TUNED]
                leased = queue.lease("worker-1", []) if jobs else None
                if leased is not None and leased.job.problem == TUNED:
                    leased.progress("screen", 1, 2, 11.0, "kernel@launch")
                    leased.complete(store.promote(won(TUNED)).revision)
                    return

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def old_client(url: str) -> dict[str, Any]:
    """What release 0.1 of the client makes of the service at `url`."""
    path = HERE / "gemmsmith-0.1.0.zip"
    done = subprocess.run(
        [sys.executable, "-W", "error", str(HERE / "old_client.py"), url],
        env={**os.environ, "PYTHONPATH": str(path), "PYTHONSAFEPATH": "1"},
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["file"].startswith(str(path)), "the client of now was run"
    assert found["version"] == "0.1.0"
    return found


def test_release_0_1_gets_what_it_can_read_and_nothing_else(settings: Settings) -> None:
    with running(settings) as service, a_worker(settings):
        found = old_client(str(service.base_url))
    ours = won(EXACT).candidate
    assert ours is not None
    best = {"use": "cutlass", "kernel": ours.kernel.name, "revision": 1, "match": "exact"}
    keep = {"use": "cublas", "kernel": None, "revision": 1, "match": "exact"}
    assert found["best"] == found["again"] == found["batch"][0] == best
    assert found["other backend"] == found["batch"][1] == found["async"] == keep
    assert found["near other backend"] == keep | {"match": "nearest"}
    assert found["batch"][2]["use"] == "cutlass"
    assert dict(found["snapshot"]) == {
        str(EXACT): "cutlass", str(FP16): "cutlass", str(LIBRARYS): "cublas",
    }  # fmt: skip
    assert found["unchanged"]
    assert found["lookup"] == ours.kernel.name
    assert found["lookup other backend"] is None
    assert found["devices"] == [H200.slug]
    assert found["jobs"] == [str(EXACT)]
    assert found["history"] == [["measured", keep]]
    assert found["results"] == ["bf16"]
    assert found["tuned"]["use"] == "cutlass"
    assert (found["events"][0], found["events"][-1]) == ("created", "finished")


def test_the_client_of_now_and_people_see_everything(settings: Settings, tmp_path: Path) -> None:
    with running(settings) as service:
        with Client(str(service.base_url), cache_dir=tmp_path / "cache") as client:
            answer = client.best(512, 4096, 4096)
            snapshot = client.snapshot()
            jobs = {status.problem for status in client.jobs()}
        seen = service.get("/best", params={"m": 512, "n": 4096, "k": 4096}).json()
        winners = service.get("/winners").json()["winners"]
        trials = service.get("/results?limit=1000").json()["trials"]
    assert answer.config is not None
    assert answer.config.launch == by_library(LIBRARYS).launch
    assert (answer.use, answer.power_penalty, len(answer.regimes)) == (Use.CUBLASLT, 1.02, 1)
    assert {row.problem for row in snapshot.rows} == {EXACT, FP16, LIBRARYS, *NEW}
    assert jobs == {EXACT, *NEW}
    assert seen["config"]["kernel"]["backend"] == "cublaslt"
    assert {row["problem"]["dtype"] for row in winners} == {"bf16", "fp16", "int8", WIDE.dtype}
    assert len(trials) == 253


def test_whoever_lists_backends_is_told_cublas_for_others(settings: Settings) -> None:
    """In every list, and never from the memory of what somebody else was told."""
    listed = {"gemmsmith-runs": "cutlass3x cutlass2x"}
    asked = {"m": 512, "n": 4096, "k": 4096}
    with running(settings) as service:
        full = service.get("/best", params=asked)
        kept = service.get("/best", params=asked, headers=listed)
        assert full.json()["use"] == "cublaslt"
        assert (kept.json()["use"], kept.json()["config"]) == ("cublas", None)
        assert kept.json()["baseline"] == full.json()["baseline"]
        assert full.headers["etag"] != kept.headers["etag"]
        assert "Gemmsmith-Runs" in kept.headers["vary"]
        for headers, tag, status in (
            (listed, kept, 304), ({}, kept, 200), (listed, full, 200), ({}, full, 304),
        ):  # fmt: skip
            given = {**headers, "if-none-match": tag.headers["etag"]}
            assert service.get("/best", params=asked, headers=given).status_code == status
        # Not from memory: a parameter that the short cut leaves to the routes.
        slow = service.get("/best", params={**asked, "dtype": "bf16", "exact": "1"}, headers=listed)
        assert slow.json()["config"] is None
        body = {"problems": [asked, {**asked, "dtype": "int8", "m": 256}]}
        [one, int8] = service.post("/best:batch", json=body, headers=listed).json()["answers"]
        assert (one["config"], int8["config"], int8["match"]) == (None, None, "exact")
        rows = service.get("/winners", headers=listed).json()["winners"]
        known = {str(row["candidate"] and row["candidate"]["kernel"]["backend"]) for row in rows}
        assert known == {"None", "cutlass3x"}
        document = service.get("/snapshot", headers=listed)
        uses = {row["problem"]["dtype"]: row["use"] for row in document.json()["winners"]}
        assert uses["int8"] == uses[WIDE.dtype] == "cublas"
        assert document.headers["etag"] != service.get("/snapshot").headers["etag"]


def test_release_0_1_asking_for_an_operation_that_it_cannot_know(settings: Settings) -> None:
    agent = {"user-agent": "gemmsmith-client"}
    asked = {"m": 256, "n": 4096, "k": 4096, "dtype": "int8"}
    with running(settings) as service:
        assert service.get("/best", params=asked).status_code == 200
        reply = service.get("/best", params=asked, headers=agent)
        assert (reply.status_code, reply.json()["type"].rpartition(":")[2]) == (404, "not-tuned")
        batch = service.post("/best:batch", json={"problems": [asked]}, headers=agent).json()
        assert batch["answers"][0]["status"] == 404
        newest = service.get("/jobs?limit=1").json()["jobs"][0]
        assert newest["problem"]["dtype"] == WIDE.dtype
        assert service.get(f"/jobs/{newest['id']}", headers=agent).status_code == 404
        latest = service.get("/jobs/latest", headers=agent).json()
        assert latest["problem"]["dtype"] == "bf16"
        path = f"/winners/history?m=256&n=4096&k=4096&dtype={INT8.dtype}"
        assert service.get(path, headers=agent).status_code == 404
