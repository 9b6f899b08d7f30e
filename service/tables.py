"""Trials and winners as tables: one list of columns for CSV, Parquet and lines of JSON.

Every table has a schema (`gemmsmith.http.replies.SCHEMA`), counted up when a column changes its
meaning or goes, not when one is added: readers go by names. Parquet files have it in their
metadata, lines of JSON in the member `schema`, HTTP answers in a header; a bare CSV file has
nothing but its names. Units are in the names: `_us` is microseconds, `_bytes` bytes.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum, StrEnum
from operator import attrgetter
from typing import Any, Generic, TypeVar

import msgspec

from gemmsmith.http.replies import SCHEMA
from tuner.extras import pip_install
from tuner.store import StoredTrial
from tuner.trial import Winner

T = TypeVar("T")
Row = dict[str, Any]

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""Characters that begin a formula in Excel, LibreOffice or Google Sheets (OWASP, CSV Injection)."""


class FileFormat(StrEnum):
    """How a file of rows is written."""

    JSONL = "jsonl"  # one JSON object a line
    CSV = "csv"  # a line of names, then one row a line
    PARQUET = "parquet"  # needs pyarrow


class UnknownField(ValueError):
    """A field that the table does not have; the message names those it has."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        self.name = name
        self.accepted = ", ".join(known)
        super().__init__(f"there is no field {name!r:.80}; there are {self.accepted}")


class ParquetMissing(ImportError):
    """pyarrow is not installed."""

    def __init__(self) -> None:
        super().__init__(
            f"Parquet is written by pyarrow, which is not installed here: {pip_install('parquet')}"
        )


@dataclass(frozen=True, slots=True)
class Table(Generic[T]):
    """How records become rows.

    Attributes:
        cells: of each column, by its name and in order, the type and the attribute of a record that
            is its value, as a path; the value is None where a part of the path is.
    """

    cells: Mapping[str, tuple[type, str]]

    @property
    def columns(self) -> dict[str, type]:
        return {name: kind for name, (kind, _) in self.cells.items()}

    def choose(self, fields: str | None) -> tuple[str, ...]:
        """The columns named in `fields`, separated by commas and in that order; all if it is None.

        Raises:
            UnknownField: there is no such column.
        """
        if fields is None:
            return tuple(self.cells)
        names = tuple(dict.fromkeys(name.strip() for name in fields.split(",")))
        for name in names:
            if name not in self.cells:
                raise UnknownField(name, self.cells)
        return names

    def rows(self, records: Iterable[T], fields: Sequence[str]) -> list[Row]:
        cells = [(name, self.cells[name][1], attrgetter(self.cells[name][1])) for name in fields]
        return [
            {name: _value(record, path, get) for name, path, get in cells} for record in records
        ]

    def write(self, rows: Sequence[Row], fields: Sequence[str], form: FileFormat) -> bytes:
        """A whole file of rows that have these columns.

        Raises:
            ParquetMissing: `form` is Parquet, and pyarrow is not installed.
        """
        match form:
            case FileFormat.JSONL:
                return b"".join(msgspec.json.encode({"schema": SCHEMA, **r}) + b"\n" for r in rows)
            case FileFormat.CSV:
                return _csv(rows, fields)
            case FileFormat.PARQUET:
                return _parquet(rows, {name: self.columns[name] for name in fields})


def inert(value: Any) -> Any:
    """Return the cell, with an apostrophe before text that a spreadsheet would run."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def timestamp(seconds: float | None) -> str | None:
    """Seconds since the epoch in RFC 3339, UTC, to the millisecond."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _csv(rows: Iterable[Row], fields: Sequence[str]) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fields)
    writer.writeheader()
    writer.writerows({name: inert(value) for name, value in row.items()} for row in rows)
    return text.getvalue().encode()


def _moment(text: str | None) -> datetime | None:
    """The time that a text says, UTC where it names no zone; None of what is no time.

    An imported winner has whatever date its file says.
    """
    try:
        at = datetime.fromisoformat(text or "")
        return at.replace(tzinfo=at.tzinfo or UTC).astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def _parquet(rows: Sequence[Row], columns: Mapping[str, type]) -> bytes:
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise ParquetMissing from None
    types = {
        bool: pyarrow.bool_(),
        int: pyarrow.int64(),
        float: pyarrow.float64(),
        str: pyarrow.string(),
        datetime: pyarrow.timestamp("ms", tz="UTC"),
    }
    written = {
        # Times are text in every other format.
        name: pyarrow.array(
            [_moment(row[name]) if kind is datetime else row[name] for row in rows], types[kind]
        )
        for name, kind in columns.items()
    }
    table = pyarrow.table(written, metadata={"gemmsmith.schema": str(SCHEMA)})
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(table, sink, compression="zstd")
    return bytes(sink.getvalue())


def _value(record: object, path: str, get: attrgetter[Any]) -> Any:
    try:
        value = get(record)
    except AttributeError:  # a part of the path is None, unless it does not exist
        value = record
        for name in path.split("."):
            if value is None:
                return None
            value = getattr(value, name)
    if isinstance(value, Enum):
        return value.value
    return timestamp(value) if path == "created_at" else value


def _columns(part: str, **kinds: type) -> dict[str, tuple[type, str]]:
    """Columns that have the names of attributes of a part of the record."""
    return {name: (kind, f"{part}.{name}") for name, kind in kinds.items()}


_PROBLEM = {"m": int, "n": int, "k": int, "batch": int, "dtype": str, "layout": str}
_TIME = {"median_us": float, "ci_low_us": float, "ci_high_us": float, "samples": int}

TRIALS: Table[StoredTrial] = Table(
    {
        "id": (int, "id"),
        "created_at": (datetime, "created_at"),
        "device": (str, "trial.device.slug"),
        **_columns("trial.problem", **_PROBLEM),
        "phase": (str, "trial.phase"),
        "kernel": (str, "trial.candidate.kernel.name"),
        "launch": (str, "trial.candidate.launch.key"),
        **_columns("trial.statistics", **_TIME),
        "failure": (str, "trial.failure.kind"),
        "error": (float, "trial.correctness.error"),
        **_columns("trial", workspace_bytes=int, replayed=bool, job=str),
    }
)
"""Trials; `error` is the relative error of the output, see
`gemmsmith.answers.answer.Correctness`.
"""

WINNERS: Table[Winner] = Table(
    {
        "device": (str, "device.slug"),
        **_columns("problem", **_PROBLEM),
        "use": (str, "use"),
        "kernel": (str, "candidate.kernel.name"),
        "launch": (str, "candidate.launch.key"),
        **_columns("statistics", **_TIME),
        "cublas_us": (float, "baseline.median_us"),
        "speedup": (float, "speedup.median"),
        "speedup_low": (float, "speedup.ci_low"),
        "speedup_high": (float, "speedup.ci_high"),
        "error": (float, "correctness.error"),
        "replayed": (bool, "replayed"),
        "origin": (str, "origin"),
        **_columns("environment", driver=str, cuda=str, cutlass=str),
        "stale": (bool, "stale"),
        "pinned": (bool, "pinned"),
        "revision": (int, "revision"),
        "promoted_at": (datetime, "promoted_at"),
        "pack": (str, "pack"),
        "job": (str, "job"),
    }
)
"""Current winners; `median_us` is the best CUTLASS candidate's, `speedup` cuBLAS's time over it."""
