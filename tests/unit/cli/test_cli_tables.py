"""`gemmsmith results` and `gemmsmith export` as tables for other programs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from pyarrow import parquet

from gemmsmith.core.problem import Problem
from gemmsmith.http.replies import SCHEMA
from service.settings import Settings
from service.tables import TRIALS, WINNERS
from tests.support.commands import run, use
from tests.support.serving import new_settings, promote, running, trial, winner
from tuner.store import Store

KNOWN = Problem(m=4096, n=4096, k=4096)


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    settings = use(new_settings(tmp_path), monkeypatch)
    promote(settings, winner(KNOWN, us=190.0), winner(Problem(m=8, n=8, k=8), us=2.0))
    with Store.open(settings.database) as store:
        store.add_trials([trial(KNOWN, i) for i in range(4)])
    return settings


def test_results_as_tables(tmp_path: Path) -> None:
    text = run("results", "--format", "csv", "--fields", "m,median_us,phase").stdout
    assert text.splitlines() == [
        "m,median_us,phase",
        *(f"4096,{us},screen" for us in (10.0, 11.0, 12.0, 13.0)),
    ]
    (first, *_) = run("results", "--fields", "launch,id", "--limit", 1).stdout.splitlines()
    assert json.loads(first) == {
        "schema": SCHEMA,
        "launch": trial(KNOWN).candidate.launch.key,
        "id": 1,
    }
    path = tmp_path / "trials.parquet"
    assert "4 rows" in run("results", "-o", path).stderr
    assert parquet.read_table(path).column_names == list(TRIALS.columns)
    winners = run("results", "--winners", "--format", "csv", "--fields", "m,speedup").stdout
    assert winners.splitlines() == ["m,speedup", "4096,1.1", "8,1.1"]


def test_a_service_gives_the_same_tables(settings: Settings, tmp_path: Path) -> None:
    mine, theirs = tmp_path / "mine.csv", tmp_path / "theirs.csv"
    run("results", "-o", mine, "--limit", 3)
    with running(settings) as client:
        run("results", "-o", theirs, "--limit", 3, "--url", client.base_url)
    assert theirs.read_bytes() == mine.read_bytes()


def test_export_writes_what_the_files_ending_says(tmp_path: Path) -> None:
    table = tmp_path / "winners.parquet"
    assert "2 winners" in run("export", table).stdout
    read = parquet.read_table(table)
    assert read.column_names == list(WINNERS.columns)
    assert read["median_us"].to_pylist() == [190.0, 2.0]
    plain = tmp_path / "winners.txt"
    run("export", plain, "--format", "csv", "--fields", "m,n")
    assert plain.read_text().splitlines() == ["m,n", "4096,4096", "8,8"]
    lines = tmp_path / "winners.jsonl"
    run("export", lines, "--fields", "m")
    assert [json.loads(line) for line in lines.read_text().splitlines()] == [
        {"schema": SCHEMA, "m": 4096},
        {"schema": SCHEMA, "m": 8},
    ]
    assert "not a winners file" in run("import", lines, code=2).stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("results", "--format", "xml"), "format must be one of jsonl, csv, parquet, got 'xml'"),
        (("results", "--fields", "m,colour"), "there is no field 'colour'; there are id, created"),
        (("export", "w.csv", "--fields", "id"), "there is no field 'id'; there are device, m, n"),
        (("results", "--json", "--format", "csv"), "--format jsonl"),
    ],
)
def test_what_is_not_taken_is_named(arguments: tuple[object, ...], says: str) -> None:
    result = run(*arguments, code=2)
    assert says in result.stderr
    assert result.stderr.count("\n") == 1


def test_without_pyarrow_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    result = run("results", "--format", "parquet", code=1)
    assert "pip install 'pyarrow>=21'" in result.stderr
