"""How commands end and how problems are typed.

Exceptions become one line and an exit status: 1 failed, 2 wrong usage or input, 130 interrupted.
`--debug` before or after the command shows the traceback instead. A problem may be typed as three
sizes, in one word, or whole as commands print it.
"""

from __future__ import annotations

import errno
import re
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from gemmsmith.core.names import named_layout
from gemmsmith.core.operation import DType, Layout, of_dtype
from gemmsmith.core.problem import MAX_EXTENT, extents
from gemmsmith.errors import GemmsmithError, InvalidProblem
from service.cli.output import CommandError, MisuseError, Stdout, note
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
        single = {
            name
            for option in self.params
            if isinstance(option, TyperOption) and not option.is_flag and option.nargs == 1
            for name in option.opts
        }
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
