"""`gemmsmith winners …` on the local database and on a service, and what `best` says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import structlog

from gemmsmith.core.problem import Problem
from service.settings import Settings
from tests.support.commands import run, use
from tests.support.serving import ENVIRONMENT, H200, new_settings, promote, running, winner
from tuner.store import Store

KNOWN = Problem(m=4096, n=4096, k=4096)
SIZES = (4096, 4096, 4096)


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    settings = use(new_settings(tmp_path), monkeypatch)
    monkeypatch.delenv("GEMMSMITH_URL", raising=False)
    monkeypatch.setattr("tuner.devices.local_gpu", lambda *_: None)
    monkeypatch.setattr("service.http.state.usable_gpu", lambda: None)
    promote(settings, *(winner(KNOWN, us=us) for us in (190.0, 180.0, 170.0)))
    with Store.open(settings.database) as store:
        store.gpus.report(H200, replace(ENVIRONMENT, cutlass="4.3.0"))
    return settings


@pytest.fixture(params=["database", "service"])
def where(request: pytest.FixtureRequest, settings: Settings) -> Iterator[tuple[str, ...]]:
    """Options that make a command ask the database, or a service on it."""
    if request.param == "database":
        yield ()
        return
    # The service is in this process: its log lines must not mix with the command's output.
    with structlog.testing.capture_logs(), running(settings) as client:
        yield ("--url", str(client.base_url))


def served(where: tuple[str, ...]) -> tuple[int, bool]:
    answer = json.loads(run("best", *SIZES, "--json", *where).stdout)
    return answer["revision"], answer["pinned"]


def test_history_pin_rollback_and_unpin(where: tuple[str, ...]) -> None:
    told = json.loads(run("winners", "history", *SIZES, "--json", *where).stdout)["revisions"]
    assert [(r["answer"]["revision"], r["current"], r["origin"]) for r in told] == [
        (3, True, "measured"),
        (2, False, "measured"),
        (1, False, "measured"),
    ]
    said = run("winners", "pin", *SIZES, 1, *where).stdout
    assert "revision 1 is served, pinned" in said
    assert served(where) == (1, True)
    rolled = json.loads(run("winners", "rollback", *SIZES, "--json", *where).stdout)
    assert (rolled["current"], rolled["answer"]["revision"]) == (True, 3)
    assert "revision 3 is served\n" in run("winners", "unpin", *SIZES, *where).stdout
    assert served(where) == (3, False)


def test_a_history_for_people(where: tuple[str, ...]) -> None:
    run("winners", "pin", *SIZES, 2, *where)
    lines = run("winners", "history", *SIZES, "--limit", 2, *where).stdout.splitlines()
    assert "4096×4096×4096" in lines[0]
    assert [line.split()[0] for line in lines[-2:]] == ["3", "2"]
    assert {"pinned", "measured", "stale", "180.00"} <= set(lines[-1].split())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("pin", *SIZES, 9), "has no revision 9; it has 1, 2, 3"),
        (("unpin", *SIZES), "is pinned"),
        (("rollback", 1, 1, 1), "tuned|tune it first"),
        (("history", 1, 1, 1), "tuned|tune it first"),
    ],
)
def test_what_cannot_be_is_one_line(
    where: tuple[str, ...], arguments: tuple[object, ...], says: str
) -> None:
    result = run("winners", *arguments, *where, code=1)
    assert result.stderr.count("\n") == 1
    assert any(part in result.stderr.lower() for part in says.split("|")), result.stderr
    assert served(where) == (3, False)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("pin", *SIZES, 0), "REVISION"),
        (("pin", *SIZES), "REVISION"),
        (("pin", *SIZES, "last"), "REVISION"),
        (("history", -1, 1, 1), "1 … 2147483647"),
        (("history", *SIZES, "--dtype", "int4"), "dtype must be one of"),
        (("history", *SIZES, "--limit", 0), "--limit"),
    ],
)
def test_wrong_input_has_status_2(
    settings: Settings, arguments: tuple[object, ...], says: str
) -> None:
    assert says in run("winners", *arguments, code=2).output


def test_best_says_what_is_stale_and_what_is_pinned(where: tuple[str, ...]) -> None:
    text = run("best", *SIZES, *where).stdout
    assert "stale      measured under software that no GPU of this model runs any more" in text
    assert "pinned" not in text
    run("winners", "pin", *SIZES, 3, *where)
    assert ", pinned\n" in run("best", *SIZES, *where).stdout
