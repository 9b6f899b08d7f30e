"""`gemmsmith results`: the trials and winners on record, for people or as a table in a file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gemmsmith.core.choices import member
from gemmsmith.core.device import recording_of
from gemmsmith.core.names import named_layout
from gemmsmith.errors import InvalidProblem
from gemmsmith.showing import lines
from service.cli.options import (
    AsJson,
    OnlyDevice,
    OnlyDType,
    SourceOptions,
    complete_formats,
    complete_layouts,
    complete_phases,
    dtypes_of,
    problem_of,
)
from service.cli.output import (
    TIMES,
    CommandError,
    MisuseError,
    counted_rows,
    emit,
    microseconds,
    note,
    table,
    times,
    writable,
)
from service.cli.session import connect, device_of, existing_store

if TYPE_CHECKING:
    from service.tables import FileFormat, Row, Table
    from tuner.trial import Winner


@dataclass(frozen=True, kw_only=True)
class ResultFilters:
    """Which trials or winners are printed."""

    problem: Annotated[
        tuple[int, int, int] | None, typer.Option(metavar="M N K", help="Only this shape.")
    ] = None
    dtype: OnlyDType = None
    layout: Annotated[
        str | None,
        typer.Option(help="Only this layout: tn, tt, nt or nn.", autocompletion=complete_layouts),
    ] = None
    batch: Annotated[int, typer.Option(help="With --problem.")] = 1
    device: OnlyDevice = None
    phase: Annotated[
        str | None, typer.Option(help="Only screen or final.", autocompletion=complete_phases)
    ] = None
    job: Annotated[str | None, typer.Option(help="Only this job's.")] = None

    def checked(self) -> dict[str, Any]:
        """The filters that were typed, as `Store.trials` takes them."""
        from gemmsmith.core.problem import Layout
        from tuner.trial import Phase

        filters: dict[str, Any] = {
            "device": self.device,
            "phase": self.phase and member("phase", Phase, self.phase),
            "job": self.job,
        }
        if self.problem is not None:
            dtype = self.dtype or "bf16"
            filters["problem"] = problem_of(
                *self.problem, batch=self.batch, dtype=dtype, layout=self.layout
            )
        else:
            name, own = named_layout(self.dtype or "")
            layout = self.layout or own
            filters["layout"] = layout and member("layout", Layout, layout.lower())
            filters["dtype"] = dtypes_of([name])[0] if name else None
        return {name: value for name, value in filters.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """The columns of a table, and the format of its file."""

    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="jsonl, csv or parquet; else by the file's ending, else jsonl.",
            autocompletion=complete_formats,
        ),
    ] = None
    fields: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME…",
            help="Columns of a table, in this order; a wrong name lists them all.",
        ),
    ] = None

    def format_of(self, path: Path | None) -> FileFormat:
        """The format of the option, else that of the file's ending, else JSON lines."""
        from service.tables import FileFormat

        if self.form is None:
            ending = path.suffix[1:] if path else ""
            return FileFormat(ending) if ending in set(FileFormat) else FileFormat.JSONL
        return member("format", FileFormat, self.form)

    def columns_of(self, kind: Table[Any]) -> tuple[str, ...]:
        """The columns of the option, else all of the table."""
        from service.tables import UnknownField

        try:
            return kind.choose(self.fields)
        except UnknownField as error:
            raise MisuseError(f"--fields: {error}") from None


@dataclass(frozen=True, kw_only=True)
class FileOptions(TableOptions):
    """A table, and the file that it is written to."""

    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="File to write; else stdout.", callback=writable),
    ] = None


def results(
    options: ResultFilters,
    winners: Annotated[
        bool, typer.Option("--winners", help="Current winners instead of trials.")
    ] = False,
    unanswered: Annotated[
        bool,
        typer.Option(
            "--unanswered",
            help="Imported winners that are not served, because they have no trusted signature.",
        ),
    ] = False,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number.")] = 50,
    *,
    file: FileOptions,
    source: SourceOptions,
    as_json: AsJson = False,
) -> None:
    """Print recorded trials, oldest first, including failed ones; with --json one per line.

    With --format, --fields or --output they are a table of plain columns for other programs.
    """
    filters = options.checked()
    as_table = file.form or file.fields or file.output
    if winners and (source.url or filters.keys() & {"problem", "phase", "job"}):
        raise MisuseError("--winners goes with --dtype, --layout, --device and --database only")
    if unanswered:
        if winners or filters or source.url or as_table:
            raise MisuseError("--unanswered goes with --limit, --database and --json only")
        with existing_store(source.database) as store:
            _show_winners(store.unanswered(limit), limit, as_json)
        return
    if as_table and as_json:
        raise MisuseError("--json is whole documents; plain columns are --format jsonl")
    if as_table:
        _write(filters, winners, limit, source, file)
    elif winners:
        _show_winners(_stored(filters, winners, limit, source.database), limit, as_json)
    else:
        _show_trials(filters, limit, source, as_json)


def _write(
    filters: dict[str, Any], winners: bool, limit: int, source: SourceOptions, file: FileOptions
) -> None:
    """Write trials or winners as plain columns."""
    from service import tables

    form = file.format_of(file.output)
    kind: tables.Table[Any] = tables.WINNERS if winners else tables.TRIALS
    columns = file.columns_of(kind)
    if source.url:
        trials = _of_service(filters, limit, source.url, fields=",".join(columns))
        rows = [{name: trial.get(name) for name in columns} for trial in trials]
    else:
        rows = kind.rows(_stored(filters, winners, limit, source.database), columns)
    write_table(kind, rows, columns, form, file.output)
    note(counted_rows(rows, limit, "rows"))


def write_table(
    kind: Table[Any],
    rows: Sequence[Row],
    columns: Sequence[str],
    form: FileFormat,
    path: Path | None,
) -> None:
    """Write rows to `path` atomically, or to stdout.

    Raises:
        CommandError: the format is Parquet, and pyarrow is not installed.
        MisuseError: the format is Parquet, and stdout is a terminal.
    """
    from gemmsmith.files import STDOUT, descriptor
    from gemmsmith.files import write as write_file
    from service.tables import ParquetMissing

    try:
        content = kind.write(rows, columns, form)
    except ParquetMissing as error:
        raise CommandError(str(error)) from None
    if path is not None and descriptor(path) != STDOUT:
        write_file(path, content)
    elif b"\0" in content and sys.stdout.isatty():
        raise MisuseError("Parquet is not for a terminal: name a file with -o, or redirect")
    else:
        if sys.stdout.isatty():
            content = lines(content.decode()).encode()
        sys.stdout.buffer.write(content)
        sys.stdout.flush()


def _of_service(
    filters: dict[str, Any], limit: int, url: str, **options: str
) -> list[dict[str, Any]]:
    from gemmsmith.http.requests import fields_of

    query = filters | options
    if problem := query.pop("problem", None):
        query |= fields_of(problem)
    with connect(url) as client:
        return list(client.results(limit=limit, **query))


def _stored(filters: dict[str, Any], winners: bool, limit: int, database: str | None) -> list[Any]:
    """Winners or trials of the database."""
    with existing_store(database) as store:
        if device := filters.get("device"):
            filters = filters | {"device": device_of(store, device)}
        return (store.winners if winners else store.trials)(**filters, limit=limit)


def _show_trials(filters: dict[str, Any], limit: int, source: SourceOptions, as_json: bool) -> None:
    import msgspec

    if source.url:
        rows = _of_service(filters, limit, source.url)
    else:
        rows = [
            {"id": stored.id, "created_at": stored.created_at, **msgspec.to_builtins(stored.trial)}
            for stored in _stored(filters, False, limit, source.database)
        ]
    if as_json:
        for row in rows:
            emit(row, line=True)
        return
    columns = ("problem", "kernel", "launch", "phase", "on", "µs", "± µs")
    understood = [cells for row in rows if (cells := _row(row)) is not None]
    table("", columns, understood, left=5)
    if len(understood) < len(rows):
        note(f"{len(rows) - len(understood)} trials need a newer gemmsmith, and are left out")
    note(counted_rows(rows, limit, "trials"))


def _row(row: dict[str, Any]) -> tuple[Any, ...] | None:
    """A trial's row of the table; None if it needs a newer gemmsmith."""
    import msgspec

    from gemmsmith.core.launch import Launch
    from gemmsmith.core.problem import Problem

    try:
        device = row["device"]["name"]
        statistics = row.get("statistics") or {}
        failure = row.get("failure") or {}
        spread = None
        if statistics:
            spread = (statistics["ci_high_us"] - statistics["ci_low_us"]) / 2
        return (
            msgspec.convert(row["problem"], Problem),
            row["candidate"]["kernel"]["name"],
            msgspec.convert(row["candidate"]["launch"], Launch).key,
            row["phase"],
            recording_of(device) if row["replayed"] else device.removeprefix("NVIDIA "),
            microseconds(statistics.get("median_us")) or failure.get("kind"),
            microseconds(spread),
        )
    except (msgspec.ValidationError, InvalidProblem, KeyError, TypeError, AttributeError):
        return None


def _show_winners(winners: list[Winner], limit: int, as_json: bool) -> None:
    if as_json:
        for winner in winners:
            emit(winner, line=True)
        return
    rows = [
        (
            winner.problem,
            winner.device.slug,
            recording_of(winner.device.name) if winner.replayed else winner.origin,
            winner.use,
            winner.candidate.kernel.name if winner.candidate else None,
            *times(winner),
        )
        for winner in winners
    ]
    columns = ("problem", "device", "origin", "use", "best CUTLASS kernel", *TIMES)
    table("", columns, rows, left=5)
    note(counted_rows(winners, limit, "winners"))
