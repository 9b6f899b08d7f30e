"""Trials and winners as tables: one list of columns for CSV, Parquet and lines of JSON.

Every table has a schema (`gemmsmith.http.replies.SCHEMA`), counted up when a column changes its
meaning or goes, not when one is added: readers go by names. Parquet files have it in their
metadata, lines of JSON in the member `schema`, HTTP answers in a header; a bare CSV file has
nothing but its names. Units are in the names: `_us` is microseconds, `_bytes` bytes.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Generic, TypeVar

import msgspec

from gemmsmith.answers.answer import Statistics
from gemmsmith.core.candidate import Candidate
from gemmsmith.core.problem import Problem
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Table(Generic[T]):
    """How records become rows.

    Attributes:
        columns: the type of each column, by its name and in order; every value may be missing.
        row: all columns of a record.
    """

    columns: Mapping[str, type]
    row: Callable[[T], Row]

    def choose(self, fields: str | None) -> tuple[str, ...]:
        """The columns named in `fields`, separated by commas and in that order; all if it is None.

        Raises:
            UnknownField: there is no such column.
        """
        if fields is None:
            return tuple(self.columns)
        names = tuple(dict.fromkeys(name.strip() for name in fields.split(",")))
        for name in names:
            if name not in self.columns:
                raise UnknownField(name, self.columns)
        return names

    def rows(self, records: Iterable[T], fields: Sequence[str]) -> list[Row]:
        return [{name: row[name] for name in fields} for row in map(self.row, records)]

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


_PROBLEM = {"m": int, "n": int, "k": int, "batch": int, "dtype": str, "layout": str}
_TIME = {"median_us": float, "ci_low_us": float, "ci_high_us": float, "samples": int}


def _problem(problem: Problem) -> Row:
    row: Row = msgspec.to_builtins(problem)
    return row


def _time(time: Statistics | None) -> Row:
    return dict.fromkeys(_TIME) if time is None else msgspec.to_builtins(time)


def _candidate(candidate: Candidate | None) -> Row:
    return {
        "kernel": candidate.kernel.name if candidate else None,
        "launch": candidate.launch.key if candidate else None,
    }


def _trial(stored: StoredTrial) -> Row:
    trial = stored.trial
    return {
        "id": stored.id,
        "created_at": timestamp(stored.created_at),
        "device": trial.device.slug,
        **_problem(trial.problem),
        "phase": trial.phase.value,
        **_candidate(trial.candidate),
        **_time(trial.statistics),
        "failure": trial.failure.kind.value if trial.failure else None,
        "error": trial.correctness.error if trial.correctness else None,
        "workspace_bytes": trial.workspace_bytes,
        "replayed": trial.replayed,
        "job": trial.job,
    }


TRIALS: Table[StoredTrial] = Table(
    columns={
        "id": int,
        "created_at": datetime,
        "device": str,
        **_PROBLEM,
        "phase": str,
        "kernel": str,
        "launch": str,
        **_TIME,
        "failure": str,
        "error": float,
        "workspace_bytes": int,
        "replayed": bool,
        "job": str,
    },
    row=_trial,
)
"""Trials; `error` is the relative error of the output, see
`gemmsmith.answers.answer.Correctness`.
"""


def _winner(winner: Winner) -> Row:
    speedup = winner.speedup
    return {
        "device": winner.device.slug,
        **_problem(winner.problem),
        "use": winner.use.value,
        **_candidate(winner.candidate),
        **_time(winner.statistics),
        "cublas_us": winner.baseline.median_us if winner.baseline else None,
        "speedup": speedup.median if speedup else None,
        "speedup_low": speedup.ci_low if speedup else None,
        "speedup_high": speedup.ci_high if speedup else None,
        "error": winner.correctness.error if winner.correctness else None,
        "replayed": winner.replayed,
        "origin": winner.origin.value,
        "driver": winner.environment.driver,
        "cuda": winner.environment.cuda,
        "cutlass": winner.environment.cutlass,
        "stale": winner.stale,
        "pinned": winner.pinned,
        "revision": winner.revision,
        "promoted_at": winner.promoted_at,
        "pack": winner.pack,
        "job": winner.job,
    }


WINNERS: Table[Winner] = Table(
    columns={
        "device": str,
        **_PROBLEM,
        "use": str,
        "kernel": str,
        "launch": str,
        **_TIME,
        "cublas_us": float,
        "speedup": float,
        "speedup_low": float,
        "speedup_high": float,
        "error": float,
        "replayed": bool,
        "origin": str,
        "driver": str,
        "cuda": str,
        "cutlass": str,
        "stale": bool,
        "pinned": bool,
        "revision": int,
        "promoted_at": datetime,
        "pack": str,
        "job": str,
    },
    row=_winner,
)
"""Current winners; `median_us` is the best CUTLASS candidate's, `speedup` cuBLAS's time over it."""
