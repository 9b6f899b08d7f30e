"""A bar on a terminal, lines elsewhere."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from service.cli import output
from service.cli.output import TUNING, Bars, Reporter, reporter

SCRIPT = """
from service.cli.output import reporter
import time
with reporter() as says:
    for i in range(2):
        says.overall(i, 2, f"problem {i}")
        for phase in ("compile", "screen"):
            for done in range(0, 5):
                says.update(phase, done, 4, best="15.70 µs")
                time.sleep(0.03)
        says.line(f"done with {i}")
"""


def on_a_terminal(script: str) -> str:
    """What the script writes to a terminal on stderr."""
    ours, theirs = pty.openpty()
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "160", "LINES": "40"}
    process = subprocess.Popen([sys.executable, "-c", script], stderr=theirs, env=environ)
    os.close(theirs)
    written = b""
    try:
        while chunk := os.read(ours, 4096):
            written += chunk
    except OSError:  # how Linux says that the other end of a terminal is closed
        pass
    os.close(ours)
    assert process.wait() == 0
    return written.decode()


def test_a_terminal_gets_a_bar_with_counts_best_and_elapsed_time() -> None:
    written = on_a_terminal(SCRIPT)
    assert "screen" in written
    assert "4/4" in written
    assert "best 15.70 µs" in written
    assert "0:00:0" in written
    assert "problem 1" in written
    assert "done with 1" in written


def test_a_pipe_gets_plain_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 1000, 2))
    monkeypatch.setattr(output.time, "monotonic", lambda: next(clock))
    found = reporter()
    assert type(found) is Reporter
    with found as says:
        says.overall(0, 1, "a problem")
        for done in range(11):
            says.update("screen", done, 10, best=f"{20 - done}.00 µs")
        says.update("finals", 0, 3, message="3 finalists")
        says.update("waiting", 0, 0)
        for _ in range(3):
            says.update("promote", 3, 3, best="10.00 µs")
        says.line("that is all")
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert lines[0] == "[1/1] a problem"
    assert lines[1] == "  screen 0/10, best 20.00 µs"
    assert any("s left" in line for line in lines)
    assert len(lines) < 11, "not a line for every step"
    assert "  screen 10/10, best 10.00 µs" in lines
    assert lines[-4:] == [
        "  finals 0/3, 3 finalists",
        "  waiting",
        "  promote 3/3, best 10.00 µs",
        "that is all",
    ]


def test_there_is_one_bar_and_it_only_grows() -> None:
    filled = []
    with Bars(TUNING) as says:
        for i, problem in enumerate(("first", "second")):
            says.overall(i, 2, problem)
            for phase, done, total in (
                ("enumerate", 0, 48), ("compile", 1, 4), ("screen", 2, 8), ("compile", 4, 4),
                ("screen", 8, 16), ("screen", 16, 16), ("finals", 0, 8), ("promote", 48, 48),
                ("compile", 1, 6), ("screen", 17, 20),  # a second look
            ):  # fmt: skip
                says.update(phase, done, total)
                (task,) = says._progress.tasks
                filled.append(task.completed)
                assert task.description == f"[{i + 1}/2] {problem}"
    assert filled == sorted(filled)
    assert 0 < filled[1] < filled[5] < 0.5 == filled[9]
    assert filled[-1] == 1.0


def test_a_part_of_the_bar_is_left_for_what_comes_later() -> None:
    with Bars(TUNING) as says:
        says.span(0.0, 0.6)
        says.overall(0, 1, "first answers")
        says.update("promote", 1, 1)
        assert says._progress.tasks[0].completed == pytest.approx(0.6)
        says.span(0.6, 1.0)
        says.overall(0, 2, "second ones")
        says.update("promote", 1, 1)
        assert says._progress.tasks[0].completed == pytest.approx(0.8)


def test_bars_do_not_mind_unknown_totals() -> None:
    with Bars() as says:
        says.update("enumerate", 0, 0, message="nothing yet")
        says.overall(0, 1, "x")
        says.update("screen", 1, 1)
