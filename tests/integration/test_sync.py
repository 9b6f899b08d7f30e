"""`gemmsmith sync`: winners of another service come in as a file's do, and are compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from gemmsmith.answers.answer import Ratio
from gemmsmith.answers.history import Origin
from gemmsmith.core.problem import Problem
from gemmsmith.core.tuning import Effort
from service import identity
from service.settings import Settings
from tests.support.commands import run, use
from tests.support.present import present
from tests.support.replacing import replace
from tests.support.serving import ENVIRONMENT, new_settings, running, winner
from tuner.jobs import Queue
from tuner.store import Store

PROBLEMS = [Problem(m=256 * (i + 1), n=1024, k=512) for i in range(60)]
FASTER = Ratio(median=1.3, ci_low=1.29, ci_high=1.31)


def settings_of(folder: Path, name: str) -> Settings:
    return new_settings(
        folder / name,
        signing_key=folder / f"{name}.key",
        trusted=folder / f"{name}-trusted",
        shipped_keys=folder / "shipped",
    )


@pytest.fixture
def theirs(tmp_path: Path) -> Settings:
    """Another site, which has signed winners of more problems than a page has."""
    made = settings_of(tmp_path, "theirs")
    with Store.open(made.database, signer=identity.signer(made)) as store:
        for problem in PROBLEMS:
            store.promote(replace(winner(problem), job="theirs"))
    return made


@pytest.fixture
def ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    return use(settings_of(tmp_path, "ours"), monkeypatch)


def pull(url: object) -> dict[str, Any]:
    """What a sync says; the service of this process logs to the same place before."""
    text = sync(url).stdout
    found: dict[str, Any] = json.loads(text[text.index("{\n") :])
    return found


def sync(url: object, *, code: int = 0) -> Result:
    return run("sync", url, "--json", code=code)


def test_winners_are_pulled_under_the_rules_of_an_import(ours: Settings, theirs: Settings) -> None:
    mine = replace(
        winner(PROBLEMS[0], us=9.0),
        environment=replace(ENVIRONMENT, gpu_uuid="GPU-1"),
        baseline=replace(
            winner(PROBLEMS[0]).baseline, median_us=11.7, ci_low_us=11.6, ci_high_us=11.8
        ),
        speedup=FASTER,
    )
    with Store.open(ours.database) as store:
        store.promote(mine)
    with running(theirs) as http:
        found = pull(http.base_url)
        assert (found["added"], found["unbelieved"], found["rechecks"]) == (0, 60, [])
        with Store.open(ours.database) as store:
            assert store.winner(PROBLEMS[1], mine.device.slug) is None

        public = identity.signer(theirs).public
        ours.trusted.mkdir(exist_ok=True)
        (ours.trusted / "theirs.pub").write_text(f"{public.line}\n")
        found = pull(http.base_url)
        assert (found["added"], found["kept"], found["not_understood"]) == (59, 1, 0)
        assert found["compared"]["disagree"] == 1
        assert found["compared"]["same"] == 59
        again = pull(http.base_url)
        assert (again["added"], again["rechecks"]) == (0, found["rechecks"])

    with Store.open(ours.database) as store:
        history = store.revisions(PROBLEMS[0], mine.device.slug)
        assert [(each.current, each.origin) for each in history] == [
            (False, Origin.IMPORTED),
            (True, Origin.MEASURED),
        ]
        pulled = present(store.winner(PROBLEMS[1], mine.device.slug))
        assert (pulled.origin, pulled.job) == (Origin.IMPORTED, None)
        assert pulled.environment.gpu_uuid == "GPU-0"
        job = Queue(store).get(found["rechecks"][0])
        assert (job.problem, job.effort) == (PROBLEMS[0], Effort.RECHECK)


def test_a_service_that_is_away_is_told_in_one_line(ours: Settings) -> None:
    assert (
        "error: nothing answers at http://127.0.0.1:9: "
        in sync("http://127.0.0.1:9", code=1).stderr
    )
