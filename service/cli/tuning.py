"""`gemmsmith tune`: find winners, on this machine, through a service or on a fleet."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from service.cli import completion
from service.cli.options import AsJson, DataOptions
from service.cli.output import MisuseError
from service.cli.tasks import TaskOptions, TuningOptions


@dataclass(frozen=True, kw_only=True)
class TuneTaskOptions(TaskOptions):
    """The problems of `tune`."""

    suite: Annotated[
        Path | None,
        typer.Option(
            "--suite",
            help="Tune every problem of this file, or of a shipped suite such as llm, instead of "
            "M N K. Where a [\\[problem]] has `calls`, what saves most time in all its calls goes "
            "first.",
            autocompletion=completion.suites,
        ),
    ] = None
    calls: Annotated[
        int | None,
        typer.Option(
            "--calls",
            metavar="N",
            help="How often you run each problem, per step, per day or in any other period. At "
            "equal priority, the problem that saves most time in all its calls goes first. Counts "
            "in a suite take precedence.",
            show_default=False,
        ),
    ] = None


def tune(
    problems: TuneTaskOptions, tuning: TuningOptions, data: DataOptions, as_json: AsJson = False
) -> None:
    """Find, verify and store the fastest kernel for M N K, or for every problem of a suite.

    Ctrl-C stops after the current candidate, with status 130. Every trial so far is kept.

    If a problem of a suite fails, the others are still tuned, and the status is 1.
    """
    from gemmsmith.http.requests import effort_of
    from service.cli import runner

    if tuning.fleet and tuning.url:
        raise MisuseError("--fleet uses the database, --url a service: give one of them")
    effort_of(tuning.effort)  # refused before a suite is read
    tasks = problems.tasks(tuning.limit, problems.calls or 0)
    if tuning.url:
        place = runner.service(tuning)
    elif tuning.fleet:
        place = runner.fleet(data, tuning)
    else:
        place = runner.here(data.settings(device=tuning.device), tuning)
    code = runner.run(place, tasks, whole=problems.suite is not None, as_json=as_json)
    if code:
        raise typer.Exit(code)
