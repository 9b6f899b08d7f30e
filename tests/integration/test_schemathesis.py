"""Schemathesis asks a running service all that its OpenAPI description allows, and what it forbids.

No answer may be a server error, or have a status, media type or member that is not described; what
is described must be accepted, what is not must be refused, and nothing is given to a wrong key.
What is asked is the same in every run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gemmsmith.core.problem import Problem
from tests.support.docs import ROOT
from tests.support.serving import filled, running
from tuner.store import Store
from tuner.store.keys import Scope

EXAMPLE = Problem(m=4096, n=6144, k=4096)  # the description's own examples ask about it
EVENTS = "/jobs/{job_id}/events"
OF_ANSWERS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_headers_conformance,response_schema_conformance"
)


def cancelled_job(client: httpx.Client) -> None:
    job = client.post("/tune", json={"m": 256, "n": 256, "k": 256}).json()["id"]
    assert client.delete(f"/jobs/{job}").json()["state"] == "cancelled"


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    settings = filled(tmp_path_factory.mktemp("keyed"), EXAMPLE, require_keys=True)
    with Store.open(settings.database) as store:
        _, secret = store.keys.create("asks-everything", Scope.ADMIN)
    with running(settings) as client:
        client.headers["Authorization"] = f"Bearer {secret}"
        cancelled_job(client)
        yield client


@pytest.fixture(scope="module")
def keyless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with running(filled(tmp_path_factory.mktemp("keyless"), EXAMPLE, require_keys=False)) as client:
        cancelled_job(client)
        yield client


def schemathesis(client: httpx.Client, folder: Path, *arguments: str) -> int:
    """Run it; how many requests it made up."""
    program = [str(Path(sys.executable).with_name("schemathesis"))]
    program += ["--config-file", str(ROOT / "tests" / "support" / "schemathesis.toml"), "run"]
    if key := client.headers.get("Authorization"):
        program += ["--header", f"Authorization: {key}"]
    done = subprocess.run(
        [*program, f"{client.base_url}/openapi.json", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    counted = re.search(r"(\d+) generated", done.stdout)
    assert counted, done.stdout
    return int(counted[1])


def unharmed(client: httpx.Client) -> None:
    """It answers as before, and counted no server error itself."""
    counted = client.get("/metrics").text
    assert 'status="200"' in counted
    assert not re.search(r'status="5\d\d"', counted)
    assert client.get("/readyz").json()["status"] == "ok"
    answer = client.get("/best", params={"m": EXAMPLE.m, "n": EXAMPLE.n, "k": EXAMPLE.k}).json()
    assert answer["match"] == "exact"


@pytest.mark.long
def test_events_are_as_described(keyed: httpx.Client, tmp_path: Path) -> None:
    # First, while the latest job is one that is over: of a waiting one, the stream does not end.
    assert schemathesis(keyed, tmp_path, "--include-path", EVENTS) > 30


@pytest.mark.long
def test_answers_are_as_described(keyed: httpx.Client, tmp_path: Path) -> None:
    assert schemathesis(keyed, tmp_path, "--exclude-path", EVENTS) > 1500
    unharmed(keyed)


def test_so_they_are_where_no_key_is_asked_for(keyless: httpx.Client, tmp_path: Path) -> None:
    phases = ["--phases", "examples,fuzzing,stateful"]
    arguments = ["--exclude-path", EVENTS, "--checks", OF_ANSWERS, *phases]
    assert schemathesis(keyless, tmp_path, *arguments) > 200
    unharmed(keyless)
