"""`gemmsmith explain`: the sentences, both sides, and the same as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from tests.support.commands import new_database, run
from tests.support.serving import new_settings, running
from tuner.explain import Explanation

FILES = ("nvidia-h200-132sm.bf16.jsonl", "nvidia-h200-132sm.bf16.group_rows.jsonl")


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return new_database(tmp_path, monkeypatch, FILES)


def test_it_prints_the_reason_and_both_sides(url: str) -> None:
    printed = run("explain", 4096, 6144, 1024).stdout
    assert "The largest difference is the epilogue" in printed
    for words in ("tiles 1,024 768", "waves 7.76 5.82", "SMs busy in the last 100 108"):
        assert words in " ".join(printed.split()), printed
    for title in ("Time", "Grid", "Occupancy", "Energy", "Where the time goes, an estimate"):
        assert any(line.startswith(title) for line in printed.splitlines()), title


def test_json_is_the_whole_explanation(url: str) -> None:
    document = json.loads(run("explain", "16x4096x14336", "--json").stdout)
    item = msgspec.convert(document, Explanation)
    assert item.work.bound == "memory"
    assert item.default is not None
    assert item.default.grid is not None


def test_a_service_explains_the_same(url: str, tmp_path: Path) -> None:
    here = json.loads(run("explain", 4096, 6144, 1024, "--json").stdout)
    printed = run("explain", 4096, 6144, 1024).stdout
    settings = new_settings(tmp_path, database=url)
    with running(settings) as http:  # whose log is on the same stdout
        address = ("--url", http.base_url)
        said = run("explain", 4096, 6144, 1024, "--json", *address).stdout
        shown = run("explain", 4096, 6144, 1024, *address).stdout
        failed = run("explain", 7, 7, 7, *address, code=1)
    served, _ = json.JSONDecoder().raw_decode(said[said.index("{\n") :])
    assert served == here
    assert [line for line in printed.splitlines() if line not in shown.splitlines()] == []
    assert "No winner is known for 7×7×7" in failed.stderr


def test_experts_without_tokens_are_named(url: str) -> None:
    printed = run("explain", "128x16x1536x2048", "--dtype", "bf16.group_rows").stdout
    assert "of 128 have tokens" in printed


def test_an_untuned_problem_names_what_to_do(url: str) -> None:
    failed = run("explain", 4097, 6144, 1024, code=1)
    assert "gemmsmith tune 4097 6144 1024" in failed.stderr
    assert "gemmsmith explain 4096 6144 1024" in failed.stderr
