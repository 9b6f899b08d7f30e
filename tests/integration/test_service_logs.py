"""The logs of a real service and its worker: one job's story, and no secrets."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx

from gemmsmith.core.problem import Problem
from service.http.access import COOKIE
from tests.support.processes import address, serving, until
from tests.support.recordings import record
from tests.support.serving import new_settings
from tuner.store import Store
from tuner.store.keys import Scope

PROBLEM = Problem(m=256, n=4096, k=4096)
COOKIE_SECRET = "gsk_this-is-no-key-but-nobody-should-read-it"


def read(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+Z", line["time"]), line
        assert line["level"] in ("info", "warning", "error"), line
        assert line["event"], line
        assert line["logger"], line
    return lines


def test_a_job_can_be_followed_through_both_logs_and_no_secret_is_in_them(tmp_path: Path) -> None:
    settings = new_settings(tmp_path / "state")
    record(tmp_path / "sweeps", PROBLEM)
    with Store.open(settings.database) as store:
        _, secret = store.keys.create("team-a", Scope.TUNE)
    environ = {
        "GEMMSMITH_DEVICE": "replay:h200",
        "GEMMSMITH_LOG_JSON": "true",
        "GEMMSMITH_REQUIRE_KEYS": "true",
    }
    headers = {"Authorization": f"Bearer {secret}", "X-Request-Id": "order-1"}
    with serving(tmp_path, "worker", **environ) as (_, banner):
        with httpx.Client(base_url=address(banner), timeout=30) as client:
            body = {"m": PROBLEM.m, "n": PROBLEM.n, "k": PROBLEM.k}
            job = client.post("/tune", json=body, headers=headers).json()["id"]
            headers.pop("X-Request-Id")
            until(
                lambda: client.get(f"/jobs/{job}", headers=headers).json()["state"] == "done",
                "the job was not done",
            )
            cookie = {"Cookie": f"{COOKIE}={COOKIE_SECRET}"}
            assert client.get("/devices", headers=cookie).status_code == 401
            assert client.get("/nowhere", headers={**headers, **cookie}).status_code == 404
            assert client.get("/best?m=0", headers=headers).status_code == 422
        until(lambda: "/nowhere" in (tmp_path / "log").read_text(), "nothing was logged")
    lines = read(tmp_path / "log")

    mine = [line for line in lines if line.get("job") == job]
    (ordered,) = [line for line in mine if line["event"] == "job_ordered"]
    assert (ordered["request"], ordered["key"], ordered["new"]) == ("order-1", "team-a", True)
    (requested,) = [line for line in lines if line.get("request") == "order-1" and "path" in line]
    assert (requested["path"], requested["status"], requested["key"]) == ("/tune", 202, "team-a")
    started, settled = [line for line in mine if line["logger"] == "tuner.jobs.worker"]
    assert (started["event"], settled["event"]) == ("job_started", "job_settled")
    assert settled["seconds"] > 0
    for line in (started, settled):
        assert (line["attempt"], line["key"]) == (1, "team-a")
    assert {line["problem"] for line in mine} == {str(PROBLEM)}

    text = (tmp_path / "log").read_text()
    assert secret not in text
    assert secret.removeprefix("gsk_")[-20:] not in text
    assert COOKIE_SECRET not in text
