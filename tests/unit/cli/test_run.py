"""`gemmsmith run`: what it starts, what it reports, and with which status it ends."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Event

import pytest

from gemmsmith.core.config import Use
from gemmsmith.core.problem import Layout, Problem
from gemmsmith.program.captured import Captured
from service import documents
from service.cli import of_run
from service.settings import Settings
from tests.support.commands import beside_program, run
from tests.support.serving import H200, promote, winner
from tuner.store import Store

FORWARD = Problem(m=4096, n=4096, k=4096)
INPUT = Problem(m=4096, n=4096, k=4096, layout=Layout.TT)
SMALL = Problem(m=16, n=16, k=16)

PROGRAM = """
import os, pathlib, sys, gemmsmith.startup.hook
from gemmsmith.core.config import Use
from gemmsmith.program.captured import Captured
from gemmsmith.core.problem import Problem
folder = os.environ.get("GEMMSMITH_CAPTURE")
print("winners", os.environ.get("GEMMSMITH"), "captures", folder is not None,
      os.environ.get("GEMMSMITH_CAPTURE_STOP"), flush=True)
if folder:
    found = Captured()
    found.problems[Problem(m=4096, n=4096, k=4096)] = 6
    (pathlib.Path(folder) / "one.products.json").write_bytes(found.document)
    if os.environ["GEMMSMITH_CAPTURE_STOP"] == "1" and len(sys.argv) < 3:
        (pathlib.Path(folder) / "stopped").touch()
sys.exit(int(sys.argv[1]))
"""
"""Stands for a program that multiplies, as its processes leave it; tests/unit/ops has real ones."""


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Nothing of this machine's own."""
    return beside_program(tmp_path, monkeypatch, PROGRAM)


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> list[Captured]:
    """What was tuned; instead of measuring, a file is written."""
    found: list[Captured] = []

    def tune(winners: of_run.ProgramWinners, captured: Captured, *_: object) -> int:
        winners.bundle.parent.mkdir(parents=True)
        winners.bundle.write_bytes(b"winners")
        found.append(captured)
        return 0

    monkeypatch.setattr(of_run, "tune", tune)
    return found


def test_what_lacks_a_winner_is_named_once_with_its_command(
    settings: Settings, capfd: pytest.CaptureFixture[str]
) -> None:
    done = run("run", "--", "python", "program.py", "0")
    out, _ = capfd.readouterr()
    assert out == "winners None captures True 0\n"
    assert done.output.splitlines() == [
        "gemmsmith: captured 6 products of 1 problem; winners cover 0% of their time",
        "  4096×4096×4096 bf16 tn has no winner, 100%: gemmsmith tune 4096 4096 4096 --dtype bf16 "
        "--layout tn",
        "  `gemmsmith run --tune -- …` tunes them for the next run",
    ]


def test_the_programs_own_status_goes_before_all(settings: Settings, tuned: list[Captured]) -> None:
    done = run("run", "--tune", "--", "python", "program.py", "7", code=7)
    assert (done.output, tuned) == ("", [])


def test_nothing_captured_is_said_and_fails_where_it_was_to_be_tuned(settings: Settings) -> None:
    for options, status in (((), 0), (("--tune",), 1)):
        done = run("run", *options, "--", "true", code=status)
        assert "nothing was captured: no Python ran" in done.output


def test_a_rehearsal_is_ended_tuned_and_run_with_its_winners(
    settings: Settings,
    tuned: list[Captured],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    run("run", "--tune", "--rehearse", "-o", "suite.toml", "--", "python", "program.py", "0")
    out, _ = capfd.readouterr()
    kept = tmp_path / "home" / "gemmsmith" / "winners" / f"{H200.slug}.gspack"
    assert out.splitlines() == [
        "winners None captures True 1",
        f"winners {kept} captures False None",
    ]
    assert [one.problems for one in tuned] == [{FORWARD: 6}]
    assert "calls = 6" in (tmp_path / "suite.toml").read_text()


WAITING = """
import os, pathlib, time
database = pathlib.Path(os.environ["GEMMSMITH_DATABASE"].removeprefix("sqlite:///"))
until = time.monotonic() + 60
while os.environ.get("GEMMSMITH_CAPTURE") and not database.exists() and time.monotonic() < until:
    time.sleep(0.05)
print("database", database.exists(), flush=True)
"""


def test_a_rehearsal_and_what_tuning_needs_run_side_by_side(
    settings: Settings,
    tuned: list[Captured],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "program.py").write_text(WAITING + PROGRAM)
    run("run", "--tune", "--rehearse", "--", "python", "program.py", "0")
    assert capfd.readouterr()[0].splitlines()[0] == "database True"
    assert tuned


def test_what_keeps_it_from_tuning_does_not_fail_a_rehearsal(
    settings: Settings, tuned: list[Captured], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEMMSMITH_DATABASE", "sqlite:////proc/no.db")
    run("run", "--tune", "--rehearse", "--", "python", "program.py", "0")
    assert tuned  # it meets the error itself
    run("run", "--tune", "--rehearse", "--", "python", "program.py", "3", code=3)


def test_a_rehearsal_that_reached_the_end_is_all(
    settings: Settings, tuned: list[Captured], capfd: pytest.CaptureFixture[str]
) -> None:
    done = run("run", "--tune", "--rehearse", "--", "python", "program.py", "0", "has no optimizer")
    assert "ended before step 2, and is not run again" in done.output
    assert len(capfd.readouterr()[0].splitlines()) == len(tuned) == 1


def test_a_database_that_cannot_be_read_does_not_fail_the_program(settings: Settings) -> None:
    run("run", "--database", "sqlite:////proc/no.db", "--", "python", "program.py", "0")


def test_wrong_options(settings: Settings) -> None:
    for options, says in (
        (("--rehearse",), "--rehearse goes with --tune"),
        (("-o", "no/suite.toml"), "no folder no"),
        (("--effort", "much"), "effort"),
    ):
        assert says in run("run", *options, "--", "true", code=2).output


def test_shares_are_of_what_the_default_takes(settings: Settings, tmp_path: Path) -> None:
    promote(settings, winner(FORWARD, device=H200, us=500.0))
    captured = Captured()
    captured.problems.update({FORWARD: 10, INPUT: 10, SMALL: 1})
    missing = tmp_path / "none.gspack"
    lines = of_run.summary(of_run.ProgramWinners(settings, missing, None), captured)
    assert lines[0].startswith("gemmsmith: captured 21 products of 3 problems; winners cover")
    assert [line.split()[0] for line in lines[1:]] == [str(INPUT).split()[0], "1", "`gemmsmith"]
    assert "1 have winners in the database that are not in" in lines[2]


def test_kernels_of_known_winners_are_compiled_meanwhile(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of other problems are not, nor any where no GPU is; an error stops the compilers."""
    known = winner(FORWARD)
    promote(settings, known)
    assert known.candidate is not None
    builder = Compilers()
    monkeypatch.setattr("service.worker.builder.open_builder", lambda *_: builder)
    with (
        Store.open(settings.database) as store,
        of_run._winners_compiled(settings, store, [FORWARD, INPUT]),
    ):
        pass
    assert builder.asked == []
    monkeypatch.setattr(of_run, "_model", lambda: H200.slug)
    with pytest.raises(KeyboardInterrupt):
        interrupted(settings, builder)
    assert builder.asked == [known.candidate.kernel]
    assert builder.stopped.is_set()


def interrupted(settings: Settings, builder: Compilers) -> None:
    with (
        Store.open(settings.database) as store,
        of_run._winners_compiled(settings, store, [FORWARD, INPUT]),
    ):
        assert builder.started.wait(10)
        raise KeyboardInterrupt


class Compilers:
    """Stands for a compile pool that takes until it is stopped."""

    def __init__(self) -> None:
        self.asked: list[object] = []
        self.started, self.stopped = Event(), Event()

    def build(self, kernels: Sequence[object]) -> Iterator[object]:
        self.asked += kernels
        self.started.set()
        yield from ()
        self.stopped.wait(10)

    def stop(self) -> None:
        self.stopped.set()


def test_products_that_a_fused_winner_replaces_are_not_tuned(settings: Settings) -> None:
    fused = Problem(m=4096, n=4096, k=4096, dtype="bf16.then_bias_gelu_tanh_aux")
    gated = Problem(m=8192, n=4096, k=1024, dtype="bf16.then_silu_gate")
    alone = Problem(m=8192, n=2048, k=1024)
    lost = Problem(m=512, n=512, k=512, dtype="bf16.then_residual")
    biased = Problem(m=4096, n=4096, k=4096, dtype="bf16.then_bias")
    promote(settings, winner(fused), winner(gated), winner(lost, use=Use.CUBLAS))
    captured = Counter({fused: 4, biased: 4, gated: 3, alone: 6, lost: 2, SMALL: 1})
    captured[Problem(m=512, n=512, k=512)] = 2
    with Store.open(settings.database) as store:
        near = of_run.near(store, H200.slug, captured)
    stored = documents.snapshot(H200.slug, near, pack_of=lambda _: None)
    left = of_run.needed(captured, stored)
    assert set(captured) - set(left) == {biased, alone}
    captured[alone] += 1  # another layer of this size runs without a gate
    assert alone in of_run.needed(captured, stored)


@pytest.mark.usefixtures("settings")
def test_the_program_does_not_wait_for_what_a_database_imports() -> None:
    script = """
import sys
from service.cli import main, program
program.run_captured = lambda *_, **__: sys.exit("sqlalchemy" in sys.modules)
main.app(["run", "--", "true"])
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_numerics_are_passed_on_where_there_are_winners(
    settings: Settings, tuned: list[Captured], capfd: pytest.CaptureFixture[str]
) -> None:
    program = Path("program.py")
    program.write_text('import os; print(os.environ.get("GEMMSMITH_NUMERICS"))\n' + PROGRAM)
    command = ("--numerics", "invariant", "--", "python", "program.py", "0")
    done = run("run", *command, code=1)
    assert "`gemmsmith run --tune --numerics invariant -- …` tunes them" in done.output
    assert capfd.readouterr().out == ""
    assert "this run is not invariant" in run("run", "--tune", *command).output
    assert capfd.readouterr().out.startswith("None\n")
    assert [str(problem) for problem in tuned[0].problems] == [
        "4096×4096×4096 bf16.sum_sequential tn"
    ]
    run("run", *command)
    assert capfd.readouterr().out.startswith("invariant\n")


def test_numerics_have_one_value(settings: Settings) -> None:
    done = run("run", "--numerics", "exact", "--", "python", "program.py", "0", code=2)
    assert "--numerics must be one of invariant, got" in done.output
