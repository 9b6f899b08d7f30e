"""Tables as files, for `export` and `results`: which format, which fields, and where to."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gemmsmith.core.choices import member
from gemmsmith.showing import lines
from service.cli import completion
from service.cli.output import CommandError, MisuseError

if TYPE_CHECKING:
    from service.http.tables import FileFormat, Row, Table

FormatName = Annotated[
    str | None,
    typer.Option(
        "--format",
        help="jsonl, csv or parquet; else by the file's ending, else jsonl.",
        autocompletion=completion.formats,
        show_default=False,
    ),
]
Fields = Annotated[
    str | None,
    typer.Option(
        "--fields",
        metavar="NAME,NAME…",
        help="Columns of a table, in this order; a wrong name lists them all.",
        show_default=False,
    ),
]


def format_of(name: str | None, path: Path | None) -> FileFormat:
    """The format that was asked for, else that of the file's ending.

    Raises:
        InvalidProblem: not a format; names those there are.
    """
    from service.http.tables import FileFormat

    if name is None:
        ending = path.suffix[1:] if path else ""
        return FileFormat(ending) if ending in set(FileFormat) else FileFormat.JSONL
    return member("format", FileFormat, name)


def fields_of(table: Table[Any], fields: str | None) -> tuple[str, ...]:
    """The columns that were asked for; all if none were.

    Raises:
        MisuseError: there is no such column; names those there are.
    """
    from service.http.tables import UnknownField

    try:
        return table.choose(fields)
    except UnknownField as error:
        raise MisuseError(f"--fields: {error}") from None


def write(table: Table[Any], rows: Sequence[Row], fields: Sequence[str], form: FileFormat) -> bytes:
    """The rows as a file.

    Raises:
        CommandError: Parquet without pyarrow.
    """
    from service.http.tables import ParquetMissing

    try:
        return table.write(rows, fields, form)
    except ParquetMissing as error:
        raise CommandError(str(error)) from None


def send(content: bytes, path: Path | None) -> None:
    """Write a file to `path` atomically, or to stdout.

    Raises:
        MisuseError: it is no text, and stdout is a terminal.
    """
    from gemmsmith.files import STDOUT, descriptor
    from gemmsmith.files import write as write_file

    if path is not None and descriptor(path) != STDOUT:
        write_file(path, content)
    elif b"\0" in content and sys.stdout.isatty():
        raise MisuseError("Parquet is not for a terminal: name a file with -o, or redirect")
    else:
        if sys.stdout.isatty():
            content = lines(content.decode()).encode()
        sys.stdout.buffer.write(content)
        sys.stdout.flush()
