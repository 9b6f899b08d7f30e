"""The command `gemmsmith`.

Exit statuses: 0 done, 1 failed, 2 wrong usage or input, 130 interrupted.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from inspect import cleandoc
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
    demo,
    doctor,
    evaluate,
    fleet,
    history,
    jobs,
    keys,
    recording,
    report,
    results,
    run,
    running,
    signing,
    sync,
    tuning,
    winners,
)
from service.cli import enumerating as space
from service.cli.guard import GuardedGroup, ProblemCommand, example
from service.cli.output import open_streams, say

app = typer.Typer(
    name="gemmsmith",
    cls=GuardedGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Find, store and serve the fastest kernel for matrix products on NVIDIA GPUs.",
    epilog="Exit status: 0 done, 1 failed, 2 wrong usage or input, 130 interrupted.",
)

_ASK = "Look up and tune"
_RUN = "Use in your program"
_SERVE = "Run a service"
_PREPARE = "Prepare and compare"
_LOOK_AFTER = "Maintain an installation"

app.command(
    "best", cls=ProblemCommand, rich_help_panel=_ASK, epilog=example("best 4096 6144 1024")
)(best.best)
app.command(
    "tune",
    cls=ProblemCommand,
    rich_help_panel=_ASK,
    epilog=example("tune 4096x6144x1024 --dtype bf16"),
)(tuning.tune)
app.command("demo", cls=ProblemCommand, rich_help_panel=_ASK, epilog=example("demo 512 512 8192"))(
    demo.demo
)
app.command(
    "enumerate",
    cls=ProblemCommand,
    rich_help_panel=_ASK,
    epilog=example("enumerate 4096 6144 1024 --limit 5"),
)(space.enumerate_)
app.add_typer(jobs.app, name="jobs", rich_help_panel=_ASK)
app.add_typer(history.app, name="winners", rich_help_panel=_ASK)
app.command(
    "results",
    cls=ProblemCommand,
    rich_help_panel=_ASK,
    epilog=example("results --problem 4096 6144 1024 --limit 10"),
)(results.results)

app.command(
    "run",
    # What follows the program's name is the program's.
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    rich_help_panel=_RUN,
    epilog=example("run --tune -- torchrun train.py"),
)(run.run)
app.command(
    "capture",
    # Likewise.
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    rich_help_panel=_RUN,
    epilog=example("capture -o suite.toml -- python train.py --steps 1"),
)(capture.capture)
app.command(
    "bake", rich_help_panel=_RUN, epilog=example("bake --suite suite.toml -o winners.gspack")
)(bake.bake)

app.command("serve", rich_help_panel=_SERVE, epilog=example("serve --worker --port 8000"))(
    running.serve
)
app.command("worker", rich_help_panel=_SERVE, epilog=example("worker --device cuda:0"))(
    running.worker
)
app.command("fleet", rich_help_panel=_SERVE, epilog=example("fleet --address local"))(fleet.fleet)
app.add_typer(keys.app, name="keys", rich_help_panel=_SERVE)
app.command("audit", rich_help_panel=_SERVE, epilog=example("audit --limit 20"))(keys.audit)
app.add_typer(signing.app, name="signing", rich_help_panel=_SERVE)

app.command(
    "compile", cls=ProblemCommand, rich_help_panel=_PREPARE, epilog=example("compile --base")
)(compiling.compile_)
app.command(
    "record",
    cls=ProblemCommand,
    rich_help_panel=_PREPARE,
    epilog=example("record 512 512 8192 -o h200.jsonl.zst"),
)(recording.record)
app.command("report", rich_help_panel=_PREPARE, epilog=example("report --dtype bf16 -o report"))(
    report.report
)
app.command("ceilings", rich_help_panel=_PREPARE, epilog=example("ceilings --device cuda:0"))(
    ceilings.ceilings
)
app.command("eval", rich_help_panel=_PREPARE, epilog=example("eval -o regret.svg"))(
    evaluate.evaluate
)

app.command("doctor", rich_help_panel=_LOOK_AFTER, epilog=example("doctor --deep"))(doctor.doctor)
app.add_typer(database.app, name="db", rich_help_panel=_LOOK_AFTER)
app.command("export", rich_help_panel=_LOOK_AFTER, epilog=example("export winners.jsonl"))(
    winners.export
)
app.command("import", rich_help_panel=_LOOK_AFTER, epilog=example("import winners.jsonl"))(
    winners.import_
)
app.command("sync", rich_help_panel=_LOOK_AFTER, epilog=example("sync https://other.example"))(
    sync.sync
)


def _wrap_help_anew() -> None:
    """Let terminals break the lines of help, not the docstrings that it is from."""
    groups = [app, *(group.typer_instance for group in app.registered_groups)]
    for command in (command for group in groups if group for command in group.registered_commands):
        paragraphs = cleandoc(getattr(command.callback, "__doc__", None) or "").split("\n\n")
        command.help = "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)


_wrap_help_anew()


def _version(wanted: bool) -> None:
    if wanted:
        say(VERSION)
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
    open_streams()
    # An interrupt within SQLAlchemy's own code is raised again, after a traceback in its log.
    logging.getLogger("sqlalchemy").addHandler(logging.NullHandler())
    given = list(sys.argv[1:] if arguments is None else arguments)
    if "--debug" in given:
        given = ["--debug", *(word for word in given if word != "--debug")]
    app(given, prog_name="gemmsmith")


if __name__ == "__main__":
    main()
