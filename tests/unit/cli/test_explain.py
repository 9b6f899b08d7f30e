"""`gemmsmith explain`: the sentences, both sides, and the same as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from gemmsmith.core.problem import Problem
from service.worker import gpu
from tests.support.commands import new_database, run
from tests.support.recordings import BEST_US, record
from tests.support.serving import H100, new_settings, running
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


def test_advice_says_how_it_is_measured(url: str) -> None:
    printed = run("explain", 1024, 50257, 768).stdout
    assert "Pad N from 50257 to 50272: predicted by the cost model" in printed
    assert "gemmsmith explain 1024 50257 768 --dtype bf16 --layout tn --measure" in printed


def test_predicted_advice_is_measured_with_what_is_compiled(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, padded = Problem(m=64, n=1001, k=64), Problem(m=64, n=1008, k=64)
    sweep = record(tmp_path, problem, padded)
    monkeypatch.setenv("GEMMSMITH_DEVICE", f"replay:{sweep}")
    run("tune", 64, 1001, 64)
    words = ("explain", 64, 1001, 64, "--measure")
    document = json.loads(run(*words, "--json").stdout)
    rows = {row["advice"]["kind"]: row for row in document["measured"]}
    assert rows["padding"]["advice"]["problem"] == msgspec.to_builtins(padded)
    assert rows["padding"]["us"] == pytest.approx(BEST_US, rel=0.01)
    assert rows["padding"]["ratio"] == pytest.approx(1.0, abs=0.02)
    assert rows["padding"]["error"] is None
    assert rows["type"]["ratio"] is None
    assert "holds no measurement" in rows["type"]["error"]
    again = run(*words).stdout  # what was measured without a gain is no longer predicted
    assert "Pad N" not in again
    assert "holds no measurement" in again


@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        ((), 1, "no GPU here that gemmsmith can measure on"),
        (("--url", "http://127.0.0.1:1"), 2, "--measure uses this machine's GPU"),
    ],
)
def test_measuring_needs_a_gpu_here(
    url: str, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], code: int, error: str
) -> None:
    monkeypatch.delenv("GEMMSMITH_DEVICE")
    monkeypatch.setattr(gpu, "usable_gpu", lambda: None)
    failed = run("explain", 4096, 6144, 1024, "--measure", *words, code=code)
    assert error in failed.stderr
    assert "Traceback" not in failed.stderr


def test_advice_for_another_gpu_is_not_measured(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GEMMSMITH_DEVICE")
    monkeypatch.setattr(gpu, "usable_gpu", lambda: H100)
    failed = run("explain", 4096, 6144, 1024, "--device", "h200", "--measure", code=1)
    assert "advice for NVIDIA H200, and the GPU here is NVIDIA H100" in failed.stderr


def test_measuring_leaves_the_problem_s_own_winner_alone(url: str) -> None:
    sizes = (16384, 3072, 1024)
    printed = run("explain", *sizes).stdout
    assert "Use tiles of" in printed
    assert "Measure other tiles: gemmsmith tune 16384 3072 1024" in printed
    before = run("winners", "history", *sizes, "--json").stdout
    document = json.loads(run("explain", *sizes, "--measure", "--json").stdout)
    kinds = {item["kind"] for item in document["advice"] if not item["is_measured"]}
    assert kinds - {row["advice"]["kind"] for row in document["measured"]} == {"tile"}
    assert run("winners", "history", *sizes, "--json").stdout == before
