"""Turns exceptions into one line and an exit status, and bad sizes into words.

Exit statuses: 0 done, 1 failed, 2 wrong usage or input, 130 interrupted. `--debug` before or
after the command shows the traceback instead.
"""

from __future__ import annotations

import errno
import re
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from gemmsmith.errors import GemmsmithError, InvalidProblem
from gemmsmith.problem import MAX_EXTENT
from service.cli.output import CommandError, MisuseError, Stdout, note
from tuner.errors import TunerError

INTERRUPTED = 130
"""Exit status after Ctrl-C."""

_NEGATIVE = re.compile(r"-[0-9]+(\.[0-9]*)?", re.ASCII)
_SIZES = re.compile(r"([0-9]+)[x×]([0-9]+)[x×]([0-9]+)(?:[x×]([0-9]+))?", re.ASCII)


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
    """The line and the exit status for an expected failure; None for an error of our own."""
    from service.settings import SettingsError  # pydantic: most commands that fail have it by then

    match error:
        case InvalidProblem() | SettingsError():
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
    """The root command."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command, reporting its expected failures as one line."""
        Stdout.is_a_file = False
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # Whoever read our output has seen enough (`| head`).
            raise typer.Exit(0) from None
        except (Exception, KeyboardInterrupt) as error:
            found = None if ctx.params.get("debug") else explain(error)
            if found is None:
                raise
            line, code = found
            note(f"error: {line}")
            raise typer.Exit(code) from None


def example(command: str) -> str:
    """What a command's help ends with: a call that works as it stands."""
    return f"Example: gemmsmith {command}"


def spread(word: str) -> list[str]:
    """`4096x6144x1024` as three words; `8x256x256x64`, as commands print a batch, with `--batch`.

    Any other word stays as it is.
    """
    found = _SIZES.fullmatch(word)
    if found is None:
        return [word]
    first, *others = (size for size in found.groups() if size is not None)
    return [first, *others] if len(others) == 2 else ["--batch", first, *others]


class ProblemCommand(TyperCommand):
    """A command that takes M N K, also as MxNxK.

    It says what is wrong with `-1` instead of 'no such option'.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Spread sizes that are one word, and refuse negative ones before they become options."""
        args = [size for word in args for size in spread(word)]
        for before, arg in zip(["", *args], args, strict=False):
            value_of_option = before.startswith("-") and "=" not in before
            if _NEGATIVE.fullmatch(arg) and (not value_of_option or _NEGATIVE.fullmatch(before)):
                raise MisuseError(f"M, N and K must be integers in 1 … {MAX_EXTENT}, got {arg}")
        return super().parse_args(ctx, args)
