"""`gemmsmith capture`: run a program as it is, and write down its matrix products."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from service.cli.output import CommandError, MisuseError, note

COMMAND = "The program and its arguments: -- torchrun --nproc-per-node 8 train.py --epochs 1"


def capture(
    command: Annotated[list[str], typer.Argument(help=COMMAND)],
    output: Annotated[Path, typer.Option("-o", "--output", help="Suite file to write.")] = Path(
        "suite.toml"
    ),
    steps: Annotated[
        int,
        typer.Option(
            min=0, help="Steps of an optimizer to capture in each process; 0: the whole run."
        ),
    ] = 0,
) -> None:
    """Run a program, and write its matrix products with their counts to a suite file.

    Of all its processes on this machine: ranks of torchrun or accelerate, modules, subprocesses.
    Forward and backward products; compiled functions run uncompiled meanwhile. The exit status is
    the program's own, and the file is written whether it succeeds or not. A capture without any
    product is an error. Then `gemmsmith tune --suite FILE` tunes what takes most time first.
    """
    from service.cli import program

    if not output.parent.is_dir():
        raise MisuseError(f"no folder {output.parent} for the suite file")
    ended = program.run(command, steps=steps)
    found = ended.found
    if ended.why and not ended.status:
        raise CommandError(f"nothing was captured: {ended.why}")
    if ended.why:
        note(f"nothing was captured: {ended.why}")
    else:
        found.save(output)
        ranks = f" of {ended.processes} processes" if ended.processes > 1 else ""
        note(
            f"{output}: {len(found.problems)} problems, {found.problems.total()} products{ranks}, "
            f"{found.skipped.total()} unsupported products"
        )
    raise typer.Exit(ended.status)
