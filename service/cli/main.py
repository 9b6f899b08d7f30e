"""The command `gemmsmith`.

Exit statuses: 0 done, 1 failed, 2 wrong usage or input, 130 interrupted.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from inspect import cleandoc, signature
from typing import Annotated, Any

import typer

from gemmsmith.version import VERSION
from service.cli import (
    bake,
    best,
    candidates,
    compiling,
    evaluate,
    exchange,
    history,
    installation,
    jobs,
    keys,
    program,
    report,
    results,
    running,
    tuning,
)
from service.cli.guard import GuardedGroup, ProblemCommand
from service.cli.options import flattened
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

_PANELS: Mapping[str, Mapping[str, tuple[Callable[..., None], str]]] = {
    "Look up and tune": {
        "best": (best.best, "4096 6144 1024"),
        "tune": (tuning.tune, "4096x6144x1024 --dtype bf16"),
        "demo": (best.demo, "512 512 8192"),
        "enumerate": (candidates.enumerate_, "4096 6144 1024 --limit 5"),
        "jobs list": (jobs.list_, "--state failed"),
        "jobs show": (jobs.show, "latest"),
        "jobs watch": (jobs.watch, "latest"),
        "jobs cancel": (jobs.cancel, "3f2a9c"),
        "jobs retry": (jobs.retry, "3f2a9c"),
        "winners history": (history.history, "4096 6144 1024"),
        "winners pin": (history.pin, "4096 6144 1024 1"),
        "winners unpin": (history.unpin, "4096 6144 1024"),
        "winners rollback": (history.rollback, "4096 6144 1024"),
        "winners sign": (history.sign, "winners.jsonl"),
        "results": (results.results, "--problem 4096 6144 1024 --limit 10"),
    },
    "Use in your program": {
        "run": (program.run, "--tune -- torchrun train.py"),
        "capture": (program.capture, "-o suite.toml -- python train.py --steps 1"),
        "bake": (bake.bake, "--suite suite.toml -o winners.gspack"),
    },
    "Run a service": {
        "serve": (running.serve, "--worker --port 8000"),
        "worker": (running.worker, "--device cuda:0"),
        "fleet": (running.fleet, "--address local"),
        "keys create": (keys.create, "me --scope tune"),
        "keys list": (keys.list_, ""),
        "keys revoke": (keys.revoke, "me"),
        "audit": (keys.audit, "--limit 20"),
        "signing show": (keys.show_signing_key, ""),
        "signing trust": (keys.trust, "http://127.0.0.1:8000"),
        "signing list": (keys.list_trusted, ""),
        "signing revoke": (keys.revoke_trust, "1f2e3d"),
        "signing packs": (keys.sign_packs, ""),
    },
    "Prepare and compare": {
        "compile": (compiling.compile_, "--base"),
        "record": (candidates.record, "512 512 8192 -o h200.jsonl.zst"),
        "report": (report.report, "--dtype bf16 -o report"),
        "ceilings": (report.ceilings, "--device cuda:0"),
        "eval": (evaluate.evaluate, "-o regret.svg"),
    },
    "Maintain an installation": {
        "doctor": (installation.doctor, "--deep"),
        "db upgrade": (installation.upgrade, ""),
        "db current": (installation.current, ""),
        "db backup": (installation.backup, "gemmsmith.backup"),
        "db restore": (installation.restore, "gemmsmith.backup"),
        "export": (exchange.export, "winners.jsonl"),
        "import": (exchange.import_, "winners.jsonl"),
        "sync": (exchange.sync, "https://other.example"),
    },
}
"""Every command, with the words of an example, which works as it stands."""

_GROUPS = {
    "jobs": "Tuning jobs: list, watch, show, cancel and retry them.",
    "winners": "The winners of a problem: history, pin, unpin, rollback; sign files.",
    "keys": "Create, list and revoke API keys.",
    "signing": "Show the signing key of this installation, and manage trusted keys.",
    "db": "Create, migrate, check, back up and restore the database.",
}


def _add(panel: str, words: str, function: Callable[..., None], example: str) -> None:
    """Add a command to its panel of the help, or to its group."""
    command = flattened(function)
    options = signature(command).parameters
    settings: dict[str, Any] = {
        "epilog": f"Example: gemmsmith {words} {example}".rstrip(),
        "help": _paragraphs(function.__doc__ or ""),
    }
    if "m" in options or "problem" in options:
        settings["cls"] = ProblemCommand
    if "command" in options:  # what follows the name of a program are its own arguments
        settings["context_settings"] = {
            "ignore_unknown_options": True,
            "allow_interspersed_args": False,
        }
    name, _, member = words.partition(" ")
    if not member:
        app.command(name, rich_help_panel=panel, **settings)(command)
        return
    if name not in _groups:
        _groups[name] = typer.Typer(help=_GROUPS[name], no_args_is_help=True)
        app.add_typer(_groups[name], name=name, rich_help_panel=panel)
    _groups[name].command(member, **settings)(command)


def _paragraphs(docstring: str) -> str:
    """The text with a line for each paragraph: terminals break lines of help by themselves."""
    paragraphs = cleandoc(docstring).split("\n\n")
    return "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)


_groups: dict[str, typer.Typer] = {}
for _panel, _commands in _PANELS.items():
    for _words, (_function, _example) in _commands.items():
        _add(_panel, _words, _function, _example)


def _version(asked: bool) -> None:
    if asked:
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
    words = list(sys.argv[1:] if arguments is None else arguments)
    if "--debug" in words:
        words = ["--debug", *(word for word in words if word != "--debug")]
    app(words, prog_name="gemmsmith")


if __name__ == "__main__":
    main()
