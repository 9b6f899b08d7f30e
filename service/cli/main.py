"""The command `gemmsmith`: its commands, how they end and how problems are typed.

Expected exceptions become one line and an exit status: 1 failed, 2 wrong usage or input, 130
interrupted. `--debug` before or after the command shows the traceback instead. A problem may be
typed as three sizes, in one word, or whole as commands print it.
"""

from __future__ import annotations

import errno
import logging
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from inspect import cleandoc, signature
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from gemmsmith.core.names import named_layout
from gemmsmith.core.operation import DType, Layout, of_dtype
from gemmsmith.core.problem import MAX_EXTENT, extents
from gemmsmith.errors import GemmsmithError, InvalidProblem
from gemmsmith.version import VERSION
from service.cli import (
    advising,
    bake,
    best,
    candidates,
    compiling,
    evaluate,
    explaining,
    installation,
    jobs,
    kernels,
    keys,
    profiling,
    program,
    report,
    results,
    running,
    winners,
)
from service.cli.options import flattened
from service.cli.output import CommandError, MisuseError, Result, Stdout, note, open_streams, say
from tuner.errors import TunerError

INTERRUPTED = 130
"""Exit status after Ctrl-C."""

_NEGATIVE = re.compile(r"-[0-9]+(\.[0-9]*)?", re.ASCII)


_ADVICE = {
    errno.EACCES: ". Change its permissions, or name another place",
    errno.EPERM: ". Change its permissions, or name another place",
    errno.EROFS: ". Name a place that can be written to",
    errno.ENOSPC: ". Make room there, or name another place",
    errno.ENOTDIR: ". Part of that path is a file: name another place",
    errno.EEXIST: ". It is no folder: name another place",
    errno.EISDIR: ". Name a file",
}
"""What to do about an error of the system, by its number."""


def explain(error: BaseException) -> tuple[str, int] | None:
    """The line and the exit status for an expected failure; None if this is a bug of ours."""
    # Most commands that fail have imported these by then.
    from service.settings import SettingsError
    from tuner.suites import SuiteError

    match error:
        case InvalidProblem() | SettingsError() | SuiteError():
            return str(error), 2
        case CommandError():
            return str(error), error.exit_code
        case GemmsmithError() | TunerError():
            return str(error), 1
        case OSError() if error.strerror:
            where = f": {error.filename}" if error.filename else ""
            advice = _ADVICE.get(error.errno or 0, "")
            return f"{error.strerror}{where}{advice}", 1
        case KeyboardInterrupt():
            return str(error) or "interrupted", INTERRUPTED
        case _:
            return None


class GuardedGroup(TyperGroup):
    """The root command: expected failures of its commands become a line and a status."""

    def invoke(self, ctx: Any) -> Any:
        Stdout.is_a_file = False
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # The reader of our output has closed it (`| head`).
            raise typer.Exit(0) from None
        except (Exception, KeyboardInterrupt) as error:
            explained = None if ctx.params.get("debug") else explain(error)
            if explained is None:
                raise
            line, code = explained
            note(f"error: {line}")
            raise typer.Exit(code) from None


def spread(word: str) -> tuple[list[str], dict[str, str]]:
    """A problem, or a part of it, as sizes and as options with their values.

    `8×256×256×64 bf16.out_f32 nt` is a whole problem. A word that is no part of a problem is taken
    for a size, which the command then refuses.
    """
    sizes: list[str] = []
    options: dict[str, str] = {}
    for part in word.split() or [word]:
        dtype, layout = named_layout(part)
        if numbers := extents(part):
            *batch, m, n, k = numbers
            sizes += [m, n, k]
            options |= {"--batch": batch[0]} if batch else {}
        elif part.lower() in list(Layout):
            options["--layout"] = part
        elif _is_dtype(dtype):
            options |= {"--dtype": dtype} | ({"--layout": layout} if layout else {})
        else:
            sizes.append(part)
    return sizes, options


def _is_dtype(text: str) -> bool:
    try:
        return bool(of_dtype(text))
    except InvalidProblem:
        # A wrong dtype, such as bf16.nonsense, gets the dtype's own error, which says more.
        return text.partition(".")[0] in list(DType)


class ProblemCommand(TyperCommand):
    """A command that takes M N K, also as MxNxK, or a whole problem as commands print it.

    For a negative size its error names the accepted range, instead of 'no such option'.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take problems apart, and refuse negative sizes before they become options."""
        words = self._spread(args)
        # `-1` is refused as a size, but not as the value of an option, as in `--priority -1`.
        for before, arg in zip(["", *words], words, strict=False):
            value_of_option = before.startswith("-") and "=" not in before
            if _NEGATIVE.fullmatch(arg) and (not value_of_option or _NEGATIVE.fullmatch(before)):
                raise MisuseError(f"M, N and K must be integers in 1 … {MAX_EXTENT}, got {arg}")
        return super().parse_args(ctx, words)

    def _spread(self, args: list[str]) -> list[str]:
        """The arguments, with problems as sizes and options.

        Raises:
            MisuseError: an option contradicts the problem.
        """
        single = _single(self)
        # The word after such an option is its value, and no part of a problem.
        words: list[str] = []
        typed: dict[str, str] = {}
        meant: dict[str, str] = {}
        for before, arg in zip(["", *args], args, strict=False):
            if before in single:
                typed[before] = arg
            if before in single or arg.startswith("-"):
                words.append(arg)
                continue
            sizes, options = spread(arg)
            words += sizes
            meant |= options
        for name, value in meant.items():
            if typed.setdefault(name, value) != value:
                raise MisuseError(f"the problem says {name} {value}, but {name} is {typed[name]}")
        return words + [word for pair in meant.items() for word in pair]


class ProgramCommand(TyperCommand):
    """A command that runs a program. `--report` needs no value; `--report=FILE` has one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Give `--report` an empty value, unless it is one of the program's own arguments."""
        words, single = list(args), _single(self)
        at = 0
        while at < len(words) and words[at].startswith("-") and words[at] != "--":
            if words[at] == "--report":
                words[at] = "--report="
            at += 2 if words[at] in single else 1
        return super().parse_args(ctx, words)


def _single(command: TyperCommand) -> set[str]:
    """The options of a command that take one value."""
    return {
        name
        for option in command.params
        if isinstance(option, TyperOption) and not option.is_flag and option.nargs == 1
        for name in option.opts
    }


app = typer.Typer(
    name="gemmsmith",
    cls=GuardedGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Find, store and serve the fastest kernel for matrix products on NVIDIA GPUs.",
    epilog="Exit status: 0 done, 1 failed, 2 wrong usage or input, 130 interrupted.",
)

_PANELS: Mapping[str, Mapping[str, tuple[Callable[..., Result | None], str]]] = {
    "Look up and tune": {
        "best": (best.best, "4096 6144 1024"),
        "explain": (explaining.explain, "4096 6144 1024"),
        "profile": (profiling.profile, "1024 2304 768"),
        "tune": (best.tune, "4096x6144x1024 --dtype bf16"),
        "demo": (best.demo, "512 512 8192"),
        "enumerate": (candidates.enumerate_, "4096 6144 1024 --limit 5"),
        "jobs list": (jobs.list_, "--state failed"),
        "jobs show": (jobs.show, "latest"),
        "jobs watch": (jobs.watch, "latest"),
        "jobs cancel": (jobs.cancel, "3f2a9c"),
        "jobs retry": (jobs.retry, "3f2a9c"),
        "winners history": (winners.history, "4096 6144 1024"),
        "winners pin": (winners.pin, "4096 6144 1024 1"),
        "winners unpin": (winners.unpin, "4096 6144 1024"),
        "winners rollback": (winners.rollback, "4096 6144 1024"),
        "winners sign": (keys.sign_winners, "winners.jsonl"),
        "results": (results.results, "--problem 4096 6144 1024 --limit 10"),
    },
    "Use in your program": {
        "run": (program.run, "--tune -- torchrun train.py"),
        "capture": (program.capture, "-o suite.toml -- python train.py --steps 1"),
        "advise": (advising.advise, "-- python train.py"),
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
        "kernels install": (kernels.install, "gemmsmith-sm90.gskernels"),
        "kernels list": (kernels.list_, "gemmsmith-sm90.gskernels"),
        "kernels build": (kernels.build, "-o gemmsmith-sm90.gskernels"),
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
        "export": (winners.export, "winners.jsonl"),
        "import": (winners.import_, "winners.jsonl"),
        "sync": (winners.sync, "https://other.example"),
    },
}
"""Every command, with the words of an example, which works as it stands."""

_GROUPS = {
    "kernels": "Install the kernels of all shipped winners from one file; build that file.",
    "jobs": "Tuning jobs: list, watch, show, cancel and retry them.",
    "winners": "The winners of a problem: history, pin, unpin, rollback; sign files.",
    "keys": "Create, list and revoke API keys.",
    "signing": "Show the signing key of this installation, and manage trusted keys.",
    "db": "Create, migrate, check, back up and restore the database.",
}


def _add(panel: str, words: str, function: Callable[..., Result | None], example: str) -> None:
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
        settings["cls"] = ProgramCommand
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
    # A line for each paragraph: terminals break lines of help by themselves.
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
