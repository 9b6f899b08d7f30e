"""`gemmsmith run --report`: its option, its arithmetic, its text and its file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from gemmsmith.core.problem import Layout, Problem
from gemmsmith.program.captured import Captured
from gemmsmith.program.ran import Ran, RanProduct
from service.cli import gained, main, of_run
from service.cli.gained import Gained
from service.cli.output import note
from service.settings import Settings
from tests.support.commands import beside_program, run

WON = Problem(m=4096, n=4096, k=4096)
LOST = Problem(m=4096, n=4096, k=4096, layout=Layout.TT)
NEAR = Problem(m=8192, n=4096, k=4096)
FUSED = Problem(m=4096, n=4096, k=4096, dtype="bf16.then_bias_gelu_tanh")
RAN = Ran(
    steps=2,
    processes=1,
    products=[
        RanProduct(problem=WON, calls=8, kernel="fast", time_us=100.0, saving_us=50.0),
        RanProduct(problem=NEAR, calls=2, kernel="near"),
        RanProduct(problem=LOST, calls=4, reason="torch's default is faster", time_us=200.0),
        RanProduct(problem=FUSED, calls=4, reason="no winner"),
        RanProduct(types="float64 × float64", calls=3, reason="no kernels exist for these types"),
    ],
)

PROGRAM = """
import os, pathlib, sys, gemmsmith.startup.hook
from gemmsmith.core.problem import Problem
from gemmsmith.program.captured import Captured
from gemmsmith.program.ran import Ran, RanProduct
folder = pathlib.Path(os.environ["GEMMSMITH_CAPTURE"])
problem = Problem(m=4096, n=4096, k=4096)
captured = Captured()
captured.problems[problem] = 6
(folder / "one.products.json").write_bytes(captured.document)
if os.environ.get("GEMMSMITH_CAPTURE_RAN") == "1":
    product = RanProduct(problem=problem, calls=6, reason="no winner", time_us=10.0)
    ran = Ran(steps=2, processes=1, products=[product])
    (folder / "one.ran.json").write_bytes(ran.document)
if os.environ["GEMMSMITH_CAPTURE_STOP"] == "1":
    (folder / "stopped").touch()
print(*sys.argv[1:])
sys.exit(int(sys.argv[1]))
"""
TEXT = "gemmsmith: products take 0.030 ms a step (the mean of 2 steps), 0.000 ms less than"


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    return beside_program(tmp_path, monkeypatch, PROGRAM)


def test_what_was_gained_in_a_step() -> None:
    report = Gained.of(RAN, {NEAR: 300.0, LOST: 1.0, WON: 1.0})
    assert (report.unit, report.steps) == ("step", 2)
    # 8 · 100 + 2 · 300 + 4 · 200 µs in two steps, and 8 · 50 µs saved
    assert report.products_ms == pytest.approx(1.1)
    assert report.saved_ms == pytest.approx(0.2)
    won, near = report.kernels
    assert (won.calls, won.us, won.torch_us, won.saved_ms) == (4.0, 100.0, 150.0, 0.2)
    assert won.share == pytest.approx(800 / 2200)
    assert (near.us, near.is_estimate, near.saved_ms) == (300.0, True, None)
    lost, types = report.by_torch
    assert (lost.us, lost.is_estimate, lost.reason) == (200.0, False, "torch's default is faster")
    assert (types.product, types.us, types.share) == ("float64 × float64", None, None)
    assert [(line.calls, line.share) for line in report.not_fused] == [(2.0, None)]


def test_without_steps_all_calls_count() -> None:
    ran = Ran(steps=0, processes=3, products=RAN.products)
    report = Gained.of(ran, {})
    assert (report.unit, report.kernels[0].calls) == ("run", 8.0)
    assert "ms in all 3 processes, 0.400 ms less than torch's" in report.text[0]


def test_the_text_has_all_parts() -> None:
    text = Gained.of(RAN, {NEAR: 300.0}).text
    assert text == [
        "gemmsmith: products take 1.100 ms a step (the mean of 2 steps), 0.200 ms less than "
        "torch's 1.300",
        f"  {gained.TIMES}",
        "    share    calls   µs each   torch's  ms saved",
        "  kernels",
        "    36.4%        4    100.00    150.00     0.200  4096×4096×4096 bf16 tn: fast",
        "    27.3%        1   ~300.00   ~300.00         –  8192×4096×4096 bf16 tn: near",
        "  torch: torch's default is faster",
        "    36.4%        2    200.00    200.00         –  4096×4096×4096 bf16 tt",
        "  torch: no kernels exist for these types",
        "        –      1.5         –         –         –  float64 × float64",
        "  not fused: no winner",
        "        –        2         –         –         –  4096×4096×4096 "
        "bf16.then_bias_gelu_tanh tn",
    ]


def test_long_reports_are_cut_and_empty_ones_are_short() -> None:
    many = [
        RanProduct(problem=Problem(m=m, n=8, k=8), calls=1, reason="no winner")
        for m in range(1, 100)
    ]
    text = Gained.of(Ran(steps=1, processes=1, products=many), {}).text
    assert text[-1] == "    and 69 more, which --report=FILE has"
    assert len(text) == 2 + 2 + gained.SHOWN + 1
    assert len(Gained.of(Ran.together([]), {}).text) == 2


@pytest.mark.parametrize(
    ("words", "value", "command"),
    [
        (["--report", "--", "python", "x.py"], "", ["python", "x.py"]),
        (["--report", "python", "x.py"], "", ["python", "x.py"]),
        (["--report", "--steps", "3", "python", "x.py"], "", ["python", "x.py"]),
        (["--steps", "3", "--report", "python", "x.py"], "", ["python", "x.py"]),
        (["--report=a.json", "--", "x.py"], "a.json", ["x.py"]),
        (["--tune", "--report=a.json", "x.py"], "a.json", ["x.py"]),
        (["x.py", "--report"], None, ["x.py", "--report"]),
        (["--", "x.py", "--report", "y"], None, ["x.py", "--report", "y"]),
        (["--steps", "3", "x.py", "--report"], None, ["x.py", "--report"]),
    ],
)
def test_the_option_takes_no_word_of_the_program(
    words: Sequence[str], value: str | None, command: list[str]
) -> None:
    made = main.typer.main.get_command(main.app).commands["run"]  # type: ignore[attr-defined]
    parsed = made.make_context("run", list(words)).params
    assert (parsed["report"], list(parsed["command"])) == (value, command)


def test_a_run_is_reported_even_if_it_fails(
    settings: Settings, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for status in (0, 7):
        words = ("--report=gained.json", "--", "python", "program.py", status)
        done = run("run", *words, code=status)
        assert done.output.startswith(TEXT)
        (line,) = json.loads((tmp_path / "gained.json").read_bytes())["by_torch"]
        assert (line["product"], line["calls"], line["us"]) == (str(WON), 3.0, 10.0)
        (tmp_path / "gained.json").unlink()
    assert TEXT not in run("run", "--", "python", "program.py", 0).output
    assert capfd.readouterr().out == "0\n7\n0\n"


def test_a_file_that_cannot_be_written_is_refused_before_the_program(
    settings: Settings, capfd: pytest.CaptureFixture[str]
) -> None:
    done = run("run", "--report=program.py/x", "--", "python", "program.py", 0, code=2)
    assert "cannot write program.py/x" in done.output
    assert capfd.readouterr().out == ""


def test_of_a_rehearsal_the_second_run_is_reported(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tune(winners: of_run.ProgramWinners, captured: Captured, *_: object) -> int:
        note("tuned")
        return 0

    monkeypatch.setattr(of_run, "tune", tune)
    done = run("run", "--tune", "--rehearse", "--report", "--", "python", "program.py", 0)
    assert done.output.index("tuned") < done.output.index(TEXT)
    assert done.output.count(TEXT) == 1


def test_a_database_that_cannot_be_read_leaves_the_times_of_the_record(settings: Settings) -> None:
    database = ("--database", "sqlite:////proc/no.db")
    done = run("run", *database, "--report", "--", "python", "program.py", 0)
    assert "the times of torch's products are not known: " in done.output
    assert TEXT in done.output
