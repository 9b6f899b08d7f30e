"""Turns exceptions into one line and an exit status, and bad sizes into words.

Exit statuses: 0 done, 1 failed, 2 wrong usage or input, 130 interrupted. `--debug` before or
after the command shows the traceback instead.
"""

from __future__ import annotations

import re
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from gemmsmith.errors import GemmsmithError, InvalidProblem
from gemmsmith.problem import MAX_EXTENT
from service.cli.output import CommandError, MisuseError, note
from tuner.errors import TunerError

_INTERRUPTED = 130
_NEGATIVE = re.compile(r"-[0-9]+(\.[0-9]*)?", re.ASCII)


def explain(error: BaseException) -> tuple[str, int] | None:
    """The line and the exit status for an expected failure; None for a fault of ours."""
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
            return f"{error.strerror}{where}", 1
        case KeyboardInterrupt():
            return "interrupted; what was measured so far is kept", _INTERRUPTED
        case _:
            return None


class GuardedGroup(TyperGroup):
    """The root command."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command, reporting its expected failures as one line."""
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


class ProblemCommand(TyperCommand):
    """A command that takes M N K: says what is wrong with `-1` instead of 'no such option'."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse negative sizes before they are read as options."""
        for before, arg in zip(["", *args], args, strict=False):
            value_of_option = before.startswith("-") and "=" not in before
            if _NEGATIVE.fullmatch(arg) and (not value_of_option or _NEGATIVE.fullmatch(before)):
                raise MisuseError(f"M, N and K must be integers in 1 … {MAX_EXTENT}, got {arg}")
        return super().parse_args(ctx, args)
