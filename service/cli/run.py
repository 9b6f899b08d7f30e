"""`gemmsmith run`: a program as it is, with its winners, and what it still lacks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from service.cli import completion
from service.cli.options import Database, DeviceName, Packs, Sweeps, Url, load_settings
from service.cli.output import MisuseError, note, writable

STEPS = 2
"""Steps captured: the second is like all that follow, and a capture costs time at each product."""


def run(
    command: Annotated[
        list[str],
        typer.Argument(help="The program and its arguments: -- torchrun --nproc-per-node 8 x.py"),
    ],
    tune: Annotated[
        bool,
        typer.Option("--tune", help="When it has ended, tune its products for the next run."),
    ] = False,
    rehearse: Annotated[
        bool,
        typer.Option(
            "--rehearse",
            help="With --tune: end the program after the captured steps, tune, then run it again.",
        ),
    ] = False,
    steps: Annotated[
        int, typer.Option(min=1, help="Optimizer steps to capture in each process.")
    ] = STEPS,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", help="Also write the captured suite to this file.", callback=writable
        ),
    ] = None,
    effort: Annotated[
        str,
        typer.Option(
            help="With --tune: quick, default, exhaustive or recheck.",
            autocompletion=completion.efforts,
        ),
    ] = "default",
    time_limit: Annotated[
        float | None,
        typer.Option(min=0, help="With --tune: seconds after which no further problem is started."),
    ] = None,
    url: Url = None,
    device: DeviceName = None,
    database: Database = None,
    packs: Packs = None,
    sweeps: Sweeps = None,
) -> None:
    """Run a program with tuned kernels, and report which of its products have no winner.

    The program is not changed. The variable GEMMSMITH makes all of its processes run tuned kernels,
    and its first steps are captured. With --tune, the captured products are tuned when the program
    has ended, the most expensive ones first. The winners are stored for the next run: in a file of
    the user's, or by the service of --url. Signals are passed on. The exit status is the program's
    own; if that is 0 and --tune failed or found nothing to tune, it is 1.
    """
    from gemmsmith.http.requests import effort_of
    from gemmsmith.winners.bundle import kept_bundle
    from service.cli import program
    from tuner.devices import local_gpu

    checked = effort_of(effort)
    if rehearse and not tune:
        raise MisuseError("--rehearse goes with --tune")
    if output is not None and not output.parent.is_dir():
        raise MisuseError(f"no folder {output.parent} for the suite file")
    settings = load_settings(device=device, database=database, packs=packs, sweeps=sweeps)
    gpu = None if url else local_gpu()
    kept = None if url else kept_bundle(settings.default_model if gpu is None else gpu.slug)

    def winners() -> str | None:
        return url or (str(kept) if kept is not None and kept.is_file() else None)

    ended = program.run(command, winners=winners(), steps=steps, stop=rehearse)
    # Only now: a database and all that goes with it take a second to import.
    from gemmsmith.errors import GemmsmithError
    from service.cli import of_run
    from tuner.errors import TunerError

    if output is not None and ended.found.problems:
        ended.save(output)
    if ended.status:
        raise typer.Exit(ended.status)
    for line in ended.unseen:
        note(f"gemmsmith: {line}")
    if ended.why:
        note(f"gemmsmith: nothing was captured: {ended.why}")
        raise typer.Exit(1 if tune else 0)
    if tune:
        status = of_run.tune(settings, ended.found, kept, url, checked, time_limit)
        if ended.stopped:
            status = program.run_plainly(command, winners()) or status
        elif rehearse:
            note(f"gemmsmith: the program ended before step {steps}, and is not run again")
        raise typer.Exit(status)
    try:
        lines = of_run.summary(settings, ended.found, kept, url)
    except (
        GemmsmithError,
        TunerError,
        OSError,
    ) as error:  # the program has succeeded, whatever we know
        lines = [f"gemmsmith: which products have winners is not known: {error}"]
    for line in lines:
        note(line)
