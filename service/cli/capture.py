"""`gemmsmith capture`: run a program as it is, and write down its matrix products."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from service.cli.output import CommandError, MisuseError, note, writable

COMMAND = "The program and its arguments: -- torchrun --nproc-per-node 8 train.py --epochs 1"


def capture(
    command: Annotated[list[str], typer.Argument(help=COMMAND)],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Suite file to write.", callback=writable)
    ] = Path("suite.toml"),
    steps: Annotated[
        int,
        typer.Option(min=0, help="Optimizer steps to capture in each process; 0: the whole run."),
    ] = 0,
) -> None:
    """Run a program, and write its matrix products and their counts to a suite file.

    Captures forward and backward products of all processes and threads on this machine, such as the
    ranks of torchrun or accelerate, also those of compiled functions. What cannot be captured runs
    as without it, and is named at the end. The exit status is the program's own, and the file is
    written even if the program fails. A capture without any product is an error.
    `gemmsmith tune --suite FILE` then tunes the products, most expensive first.
    """
    from service.cli import program

    if not output.parent.is_dir():
        raise MisuseError(f"no folder {output.parent} for the suite file")
    ended = program.run(command, steps=steps)
    found = ended.found
    for line in ended.unseen:
        note(line)
    if ended.why and not ended.status:
        raise CommandError(f"nothing was captured: {ended.why}")
    if ended.why:
        note(f"nothing was captured: {ended.why}")
    else:
        ended.save(output)
        ranks = f" of {ended.processes} processes" if ended.processes > 1 else ""
        note(
            f"{output}: {len(found.problems)} problems, {found.problems.total()} products{ranks}, "
            f"{found.skipped.total()} unsupported products"
        )
    raise typer.Exit(ended.status)
