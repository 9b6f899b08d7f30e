"""`gemmsmith eval` on a small recording: table, JSON, picture, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from gemmsmith.core.problem import Problem
from service.cli import evaluate
from service.cli.output import CommandError, MisuseError
from tests.support.commands import run
from tests.support.recordings import record

PROBLEMS = (Problem(m=256, n=4096, k=4096), Problem(m=256, n=4096, k=8192))


@pytest.fixture
def sweeps(tmp_path: Path) -> Path:
    record(tmp_path / "sweeps", *PROBLEMS)
    return tmp_path / "sweeps"


def judged(*arguments: object) -> str:
    return run("eval", *arguments).stdout


def test_the_table_names_every_strategy(sweeps: Path) -> None:
    printed = judged("--sweeps", sweeps)
    for name in (
        "gemmsmith, default",
        "gemmsmith, quick",
        "… after compile --base",
        "random, mean of 20",
    ):
        assert name in printed
    assert "2 problems" in printed


def test_the_json_has_a_figure_for_each_problem_and_count(sweeps: Path) -> None:
    document = json.loads(judged("--sweeps", sweeps, "--json"))
    assert document["problems"] == 2
    for strategy in document["strategies"]:
        assert set(strategy["regrets"]) == {str(problem) for problem in PROBLEMS}
        assert {len(row) for row in strategy["regrets"].values()} == {len(strategy["counts"])}
    assert document["strategies"][0]["worst"][-1] == 0
    assert document["flips"]["rate"] == 0
    assert [each["distance"] for each in document["neighbours"]] == [1.0, 1.0]


def test_the_picture_has_two_lines_a_strategy(sweeps: Path, tmp_path: Path) -> None:
    picture = tmp_path / "regret.svg"
    assert str(picture) in judged("--sweeps", sweeps, "-o", picture).replace("\n", "")
    drawn = ElementTree.fromstring(picture.read_text())
    lines = drawn.findall("{http://www.w3.org/2000/svg}polyline")
    document = json.loads(judged("--sweeps", sweeps, "--json"))
    assert len(lines) == 2 * len(document["strategies"])


def test_a_folder_without_recordings_is_said(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="no recorded sweep"):
        evaluate.load(tmp_path)


def test_only_svg_is_drawn(sweeps: Path) -> None:
    with pytest.raises(MisuseError, match=r"NAME\.svg"):
        evaluate.evaluate(sweeps=sweeps, output=Path("regret.png"))
