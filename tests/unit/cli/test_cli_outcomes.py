"""What commands say of what they found, of jobs that wait, and of jobs that are left behind."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from gemmsmith.core.kernel import AnyKernel
from gemmsmith.core.problem import Problem
from service.cli.compiling import _of_problems
from service.cli.options import typed
from service.cli.outcomes import Status, TaskOutcome, not_served
from service.cli.output import Reporter
from service.cli.runner import run
from service.cli.tasks import Task
from tests.support.commands import run as command
from tests.support.replacing import replace
from tests.support.serving import H200, winner
from tuner.backends import Level
from tuner.errors import NoLegalCandidate
from tuner.jobs import Queue
from tuner.store import Store

PROBLEM = Problem(m=256, n=4096, k=4096)
MEASURED = replace(winner(PROBLEM), revision=1)
KERNEL = winner(PROBLEM).candidate.kernel.name  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("served", "said"),
    [
        (None, ""),
        (replace(MEASURED, revision=2), ""),
        (
            MEASURED,
            "kept as revision 2; revision 1, which a GPU has measured, stays served: 10.00 µs, "
            f"1.100 × cuBLAS, {KERNEL}",
        ),
        (
            replace(MEASURED, pinned=True, replayed=True),
            "kept as revision 2; revision 1, which is pinned, stays served: 10.00 µs (recorded "
            f"H200), 1.100 × cuBLAS, {KERNEL}",
        ),
    ],
)
def test_a_winner_that_is_not_served_is_told_apart(served: object, said: str) -> None:
    assert not_served(2, served) == said  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (PROBLEM, "256 4096 4096 --dtype bf16 --layout tn"),
        (
            Problem.parse("8x256x4096x4096 bf16.group_rows tt"),
            "256 4096 4096 --dtype bf16.group_rows --layout tt --batch 8",
        ),
    ],
)
def test_a_problem_is_typed_whole(problem: Problem, words: str) -> None:
    assert shlex.split(typed(problem)) == words.split()


def test_a_waiting_job_of_the_database_says_that_no_worker_lives(sqlite_url: str) -> None:
    with Store.open(sqlite_url) as store:
        job, _ = Queue(store).enqueue(PROBLEM)
    shown = command("jobs", "show", "latest", "--database", sqlite_url)
    waits = "waits: no worker is alive; start one with gemmsmith worker"
    assert shown.stdout.splitlines()[0] == f"{job.id}  waiting  ({waits})"


def test_who_stops_waiting_for_a_fleet_is_told_how_to_cancel(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_seconds: float) -> None:
        raise KeyboardInterrupt

    clock = SimpleNamespace(monotonic=time.monotonic, sleep=interrupted)
    monkeypatch.setattr("service.cli.runner.time", clock)
    left = command("tune", "256x4096x4096", "--fleet", "--database", sqlite_url, code=130)
    with Store.open(sqlite_url) as store:
        (job,) = Queue(store).list()
    cancel = f"gemmsmith jobs cancel {job.id} --database {sqlite_url}"
    assert left.stderr.endswith(f"error: interrupted: the job goes on; to cancel: {cancel}\n")


class Interrupted:
    """A place that answers a problem twice, leaves one aside, and is stopped before the last."""

    def request(self, tasks: Sequence[Task], whole: bool) -> None:
        assert whole
        self.tasks = tasks

    def outcomes(self, says: Reporter) -> Iterator[TaskOutcome]:
        first, second, _ = self.tasks
        yield TaskOutcome(task=first, status=Status.FAILED, error="no answer yet")
        yield TaskOutcome(task=second, status=Status.UNRECORDED, error="not in the recording")
        yield TaskOutcome(task=first, status=Status.TUNED, result=MEASURED)
        raise KeyboardInterrupt

    def left_behind(self, outcomes: Sequence[TaskOutcome]) -> str:
        return f"interrupted with {len(outcomes)} outcomes"


def test_an_interrupted_command_prints_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    tasks = [Task(problem=replace(PROBLEM, m=m), origin="") for m in (256, 512, 1024)]
    with pytest.raises(KeyboardInterrupt, match="interrupted with 2 outcomes"):
        run(nullcontext(Interrupted()), tasks, whole=True, as_json=False)
    out, err = capsys.readouterr()
    assert "1 tuned, 1 unrecorded in 0 s" in out
    assert "256×4096×4096 bf16 tn: failed: no answer yet" in err
    assert "not in the recording" not in err  # summed up at the end
    assert "not recorded, so not tuned: 512×4096×4096" in out


def test_problems_without_kernels_do_not_keep_a_suite_from_compiling(
    sqlite_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    without, with_kernels = (Problem.parse(f"512x512x512 tf32 {layout}") for layout in ("tt", "tn"))
    with Store.open(sqlite_url) as store:

        def chosen(*problems: Problem) -> list[AnyKernel]:
            tasks = [Task(problem=problem, origin="") for problem in problems]
            return _of_problems(store, tasks, H200, Level.CORE, 2)

        assert len(chosen(without, with_kernels)) == 2
        assert capsys.readouterr().err.startswith("1 of 2 problems have no kernels to compile: 512")
        with pytest.raises(NoLegalCandidate, match="no backend has kernels"):
            chosen(without)
