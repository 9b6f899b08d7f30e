"""What commands print: results to stdout, everything else to stderr.

With `--json` stdout holds exactly one JSON document (`results`: one a line) and nothing else, so
that it can be piped. Errors are one line `error: …` on stderr, whatever the format.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import typer


class CommandError(Exception):
    """A command that cannot go on; the message says what to do. Exit status 1."""

    exit_code = 1


class MisuseError(CommandError):
    """Wrong or missing arguments; the message names what is accepted. Exit status 2."""

    exit_code = 2


def writable(path: Path | None) -> Path | None:
    """A file or folder that is to be written, as an option gives it: refused before the work.

    Raises:
        MisuseError: the place cannot be written to.
    """
    if path is None:
        return None
    place = next(folder for folder in path.absolute().parents if folder.exists())
    if not place.is_dir():
        raise MisuseError(f"cannot write {path}: {place} is a file, not a folder")
    if not os.access(place, os.W_OK | os.X_OK):
        raise MisuseError(f"cannot write {path}: no permission in {place}; name another place")
    return path


def emit(data: Any, *, line: bool = False) -> None:
    """Print a JSON document to stdout, on one `line` or indented."""
    import msgspec

    text = msgspec.json.encode(data)
    if not line:
        text = msgspec.json.format(text, indent=2)
    sys.stdout.write(text.decode() + "\n")
    sys.stdout.flush()


def say(text: str) -> None:
    """Print a line of the result to stdout."""
    typer.echo(text)


def note(text: str) -> None:
    """Print a line that is not the result to stderr."""
    typer.echo(text, err=True)


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, left: int = 1
) -> None:
    """Print a table to stdout; the first `left` columns are text, the others figures."""
    from rich.console import Console
    from rich.table import Table

    drawn = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    for i, name in enumerate(columns):
        drawn.add_column(
            name, justify="left" if i < left else "right", overflow="fold", no_wrap=i >= left
        )
    for row in rows:
        drawn.add_row(*("–" if cell is None else str(cell) for cell in row))
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:  # nothing is cut off in a file or a pipe
        console = Console(highlight=False, markup=False, width=200)
    console.print(drawn)


def counted(number: int, thing: str) -> str:
    """`1 winner`, `2 winners`."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def microseconds(value: float | None) -> str | None:
    """A time for people."""
    return None if value is None else f"{value:.2f}"


def ratio(value: float | None) -> str | None:
    """A speed-up for people."""
    return None if value is None else f"{value:.3f}"
