"""`gemmsmith tune`: find winners, on this machine or through a service."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli import completion
from service.cli.options import (
    AsJson,
    Batch,
    Calls,
    Database,
    DeviceName,
    DTypeNames,
    LayoutName,
    Limit,
    OptionalK,
    OptionalM,
    OptionalN,
    Packs,
    Sweeps,
    Url,
    dtypes_of,
    load_settings,
    problem_of,
)
from service.cli.output import MisuseError

if TYPE_CHECKING:
    from service.cli.tasks import Task
    from tuner.suites import Suite


def tune(
    m: OptionalM = None,
    n: OptionalN = None,
    k: OptionalK = None,
    suite: Annotated[
        Path | None,
        typer.Option(
            "--suite",
            help="Tune every problem of this file, or of a shipped suite such as llm, instead of "
            "M N K. Where a [\\[problem]] has `calls`, what saves most time in all its calls goes "
            "first.",
            autocompletion=completion.suites,
        ),
    ] = None,
    dtype: DTypeNames = None,
    layout: LayoutName = None,
    batch: Batch = 1,
    calls: Calls = None,
    effort: Annotated[
        str,
        typer.Option(
            help="quick, default, exhaustive or recheck.", autocompletion=completion.efforts
        ),
    ] = "default",
    device: DeviceName = None,
    url: Url = None,
    again: Annotated[
        bool,
        typer.Option("--again", help="With --suite: also problems whose winner is current."),
    ] = False,
    time_limit: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Seconds after which no further problem is started. With --url: seconds to wait "
            "for room in the service's queue.",
        ),
    ] = None,
    deadline: Annotated[
        int | None,
        typer.Option(
            metavar="SECONDS",
            help="With --url: seconds after which a job without a winner fails.",
            show_default=False,
        ),
    ] = None,
    compiled_only: Annotated[
        bool,
        typer.Option("--compiled-only", help="Only kernels compiled before: no waiting for nvcc."),
    ] = False,
    limit: Limit = None,
    priority: Annotated[
        int, typer.Option(min=-100, max=100, help="With --url or --fleet: higher goes first.")
    ] = 0,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait/--no-wait", help="With --url or --fleet: follow the jobs to their end."
        ),
    ] = True,
    fleet: Annotated[
        bool,
        typer.Option(
            "--fleet",
            help="On the GPUs of `gemmsmith fleet`: by jobs in the database, longest first.",
        ),
    ] = False,
    database: Database = None,
    packs: Packs = None,
    sweeps: Sweeps = None,
    as_json: AsJson = False,
) -> None:
    """Find, verify and store the fastest kernel for M N K, or for every problem of a suite.

    Ctrl-C stops after the current candidate, with status 130. Every trial so far is kept.

    If a problem of a suite fails, the others are still tuned, and the status is 1.
    """
    from gemmsmith.http.requests import deadline_of, effort_of
    from service.cli import tune_fleet, tune_local, tune_remote

    if fleet and url:
        raise MisuseError("--fleet uses the database, --url a service: give one of them")
    checked = effort_of(effort)
    found = tasks(m, n, k, suite, dtype, layout, batch, limit, calls or 0)
    if url:
        code = tune_remote.run(
            url,
            found,
            effort=checked,
            priority=priority,
            device=device,
            deadline_s=deadline_of(deadline),
            time_limit=time_limit,
            wait=wait,
            as_json=as_json,
            whole=suite is not None,
        )
    elif fleet:
        code = tune_fleet.run(
            load_settings(device=device, database=database),
            found,
            effort=checked,
            priority=priority,
            deadline_s=deadline_of(deadline),
            skip_current=suite is not None and not again,
            wait=wait,
            as_json=as_json,
            whole=suite is not None,
            place=("--database", database) if database else (),
        )
    else:
        settings = load_settings(device=device, database=database, packs=packs, sweeps=sweeps)
        code = tune_local.run(
            settings,
            found,
            effort=checked,
            skip_current=suite is not None and not again,
            compiled_only=compiled_only,
            time_limit=time_limit,
            as_json=as_json,
            whole=suite is not None,
        )
    if code:
        raise typer.Exit(code)


def load_suite(path: Path) -> Suite:
    """Read a suite.

    Raises:
        MisuseError: it cannot be read, or an entry makes no sense.
    """
    from tuner.suites import SuiteError, load

    try:
        return load(path)
    except SuiteError as error:
        raise MisuseError(str(error)) from error


def tasks(
    m: int | None,
    n: int | None,
    k: int | None,
    suite: Path | None,
    dtypes: list[str] | None,
    layout: str | None,
    batch: int,
    limit: int | None,
    calls: int = 0,
) -> list[Task]:
    """The problems that arguments name: one shape or a suite, in every one of `dtypes`.

    None are those that the suite's problems say, else bf16.

    `calls` is how often each is run; what a suite says about that goes before.

    Raises:
        MisuseError: neither or both, or an unreadable suite.
        InvalidProblem: a shape or `calls` that makes no sense.
    """
    from gemmsmith.core.operation import DType
    from gemmsmith.http.requests import calls_of
    from service.cli.tasks import Task

    calls = calls_of(calls)
    sizes = [size for size in (m, n, k) if size is not None]
    if suite is not None:
        if sizes:
            raise MisuseError("give M N K or --suite FILE, not both")
        loaded = load_suite(suite)
        kinds = dtypes_of(dtypes) if dtypes else loaded.dtypes or [DType.BF16.value]
        found = [
            Task(
                problem=problem,
                origin=entry.origin,
                calls=calls if entry.calls is None else entry.calls,
            )
            for kind in kinds
            for entry, problem in loaded.problems(kind)
        ]
        return found[:limit]
    if m is None or n is None or k is None:
        raise MisuseError(
            f"three sizes M N K are needed, got {len(sizes)}; or a suite: --suite llm"
        )
    problems = dict.fromkeys(
        problem_of(m, n, k, batch=batch, dtype=name.strip(), layout=layout)
        for name in ",".join(dtypes or [DType.BF16]).split(",")
    )
    return [Task(problem=problem, origin="", calls=calls) for problem in problems][:limit]
