"""The command `gemmsmith`.

Exit statuses: 0 done, 1 failed, 2 wrong usage or input, 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from gemmsmith.version import VERSION
from service.cli import (
    bake,
    best,
    capture,
    ceilings,
    compiling,
    database,
    doctor,
    evaluate,
    fleet,
    history,
    jobs,
    keys,
    recording,
    report,
    results,
    running,
    signing,
    space,
    sync,
    tuning,
    winners,
)
from service.cli.guard import GuardedGroup, ProblemCommand

app = typer.Typer(
    name="gemmsmith",
    cls=GuardedGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Finds, keeps and serves the fastest CUTLASS kernel for a matrix product on a GPU.",
    epilog="Exit status: 0 done, 1 failed, 2 wrong usage or input, 130 interrupted.",
)

app.command("serve")(running.serve)
app.command("worker")(running.worker)
app.command("fleet")(fleet.fleet)
app.command("tune", cls=ProblemCommand)(tuning.tune)
app.command("best", cls=ProblemCommand)(best.best)
app.command("enumerate", cls=ProblemCommand)(space.enumerate_)
app.command("compile", cls=ProblemCommand)(compiling.compile_)
app.command("bake")(bake.bake)
app.command("record", cls=ProblemCommand)(recording.record)
app.command(
    "capture",
    # What follows the script's name is the script's.
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)(capture.capture)
app.add_typer(jobs.app, name="jobs")
app.command("results")(results.results)
app.command("report")(report.report)
app.command("ceilings")(ceilings.ceilings)
app.command("eval")(evaluate.evaluate)
app.add_typer(database.app, name="db")
app.add_typer(keys.app, name="keys")
app.command("audit")(keys.audit)
app.add_typer(signing.app, name="signing")
app.add_typer(history.app, name="winners")
app.command("export")(winners.export)
app.command("import")(winners.import_)
app.command("sync")(sync.sync)
app.command("doctor")(doctor.doctor)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(VERSION)
        raise typer.Exit


@app.callback()
def root(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks; also after the command.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit with its status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if "--debug" in given:
        given = ["--debug", *(word for word in given if word != "--debug")]
    app(given, prog_name="gemmsmith")


if __name__ == "__main__":
    main()
