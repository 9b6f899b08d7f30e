"""Tasks: the problems of a command, which come from its options or a suite; how they are tuned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from gemmsmith.core.numerics import with_numerics
from gemmsmith.core.operation import DType
from gemmsmith.core.problem import Problem
from service.cli.options import (
    Batch,
    CompiledOnly,
    DeviceName,
    LayoutName,
    Limit,
    NumericsName,
    SizeOptions,
    Url,
    complete_dtypes,
    complete_efforts,
    complete_suites,
    dtypes_of,
    problem_of,
)
from service.cli.output import MisuseError


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A problem and where it comes from; `origin` is empty if it was typed.

    `calls` is how often the user runs it, 0 if that is not known.
    """

    problem: Problem
    origin: str
    calls: int = 0


def by_stake(tasks: Sequence[Task], saving_us: Callable[[Problem], float]) -> list[Task]:
    """The tasks, most time at stake first: calls × what tuning is expected to save in each.

    Tasks without calls have no time at stake: they keep their order and come last.
    """

    def stake(task: Task) -> float:
        return task.calls * saving_us(task.problem) if task.calls else 0.0

    return sorted(tasks, key=stake, reverse=True)


@dataclass(frozen=True, kw_only=True)
class TaskOptions(SizeOptions):
    """The options that name problems: M N K, or a suite."""

    suite: Annotated[
        Path | None,
        typer.Option(
            help="Every problem of this file instead of M N K.", autocompletion=complete_suites
        ),
    ] = None
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            "--dtype",
            "--dtypes",
            help="Element types: bf16, fp16, fp8_e4m3, fp8_e5m2, int8, tf32; repeatable, or with "
            "commas. Default: what the suite's problems say, else bf16.",
            autocompletion=complete_dtypes,
        ),
    ] = None
    layout: LayoutName = None
    batch: Batch = 1
    numerics: NumericsName = None

    def tasks(self, limit: int | None, calls: int = 0) -> list[Task]:
        """At most `limit` problems, in every element type of the options.

        `calls` is how often each is run, unless the suite says so itself. With `numerics`, problems
        of a suite that have no order of sums are left out.

        Raises:
            MisuseError: neither M N K nor a suite, or both.
            SuiteError: the suite cannot be read.
            InvalidProblem: a shape or `calls` is not valid.
        """
        from gemmsmith.http.requests import calls_of
        from tuner.suites import load

        calls = calls_of(calls)
        if self.suite is None:
            sizes = self.three("or a suite: --suite llm")
            names = ",".join(self.dtype or [DType.BF16]).split(",")
            problems = (
                problem_of(*sizes, batch=self.batch, dtype=name.strip(), layout=self.layout)
                for name in names
            )
            problems = (with_numerics(problem, self.numerics) for problem in problems)
            tasks = [Task(problem=p, origin="", calls=calls) for p in dict.fromkeys(problems)]
            return tasks[:limit]
        if (self.m, self.n, self.k) != (None, None, None):
            raise MisuseError("give M N K or --suite FILE, not both")
        suite = load(self.suite)
        dtypes = dtypes_of(self.dtype) if self.dtype else suite.dtypes or [DType.BF16.value]
        tasks = [
            Task(
                problem=problem,
                origin=entry.origin,
                calls=calls if entry.calls is None else entry.calls,
            )
            for dtype in dtypes
            for entry, problem in suite.problems(dtype, self.numerics)
        ]
        return tasks[:limit]


@dataclass(frozen=True, kw_only=True)
class TuningOptions:
    """How problems are tuned, and where: here, by the service at `url`, or on a fleet."""

    effort: Annotated[
        str,
        typer.Option(
            help="quick, default, exhaustive or recheck.", autocompletion=complete_efforts
        ),
    ] = "default"
    device: DeviceName = None
    url: Url = None
    again: Annotated[
        bool, typer.Option("--again", help="With --suite: also problems whose winner is current.")
    ] = False
    time_limit: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Seconds after which no further problem is started. With --url: seconds to wait "
            "for room in the service's queue.",
        ),
    ] = None
    deadline: Annotated[
        int | None,
        typer.Option(
            metavar="SECONDS", help="With --url: seconds after which a job without a winner fails."
        ),
    ] = None
    compiled_only: CompiledOnly = False
    limit: Limit = None
    priority: Annotated[
        int, typer.Option(min=-100, max=100, help="With --url or --fleet: higher goes first.")
    ] = 0
    wait: Annotated[
        bool,
        typer.Option(
            "--wait/--no-wait", help="With --url or --fleet: follow the jobs to their end."
        ),
    ] = True
    fleet: Annotated[
        bool,
        typer.Option(
            "--fleet",
            help="On the GPUs of `gemmsmith fleet`: by jobs in the database, longest first.",
        ),
    ] = False
