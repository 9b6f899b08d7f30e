"""`gemmsmith results`: the trials and winners on record, for people or as a table in a file."""

from __future__ import annotations

from collections.abc import Sized
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gemmsmith.core.choices import member
from gemmsmith.core.device import recording_of
from gemmsmith.core.names import named_layout
from gemmsmith.errors import InvalidProblem
from service.cli import completion
from service.cli.files import Fields, FormatName, fields_of, format_of, send, write
from service.cli.options import (
    AsJson,
    Database,
    OnlyDevice,
    Url,
    connect,
    device_called,
    dtypes_of,
    load_settings,
    problem_of,
)
from service.cli.output import MisuseError, emit, microseconds, note, ratio, table, writable

if TYPE_CHECKING:
    from tuner.store import Store, StoredTrial
    from tuner.trial import Winner


def results(
    problem: Annotated[
        tuple[int, int, int] | None,
        typer.Option("--problem", metavar="M N K", help="Only this shape.", show_default=False),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Only these element types.", autocompletion=completion.dtypes, show_default=False
        ),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            help="Only this layout: tn, tt, nt or nn.",
            autocompletion=completion.layouts,
            show_default=False,
        ),
    ] = None,
    batch: Annotated[int, typer.Option(help="With --problem.")] = 1,
    device: OnlyDevice = None,
    phase: Annotated[
        str | None,
        typer.Option(
            help="Only screen or final.", autocompletion=completion.phases, show_default=False
        ),
    ] = None,
    job: Annotated[str | None, typer.Option(help="Only this job's.", show_default=False)] = None,
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
    form: FormatName = None,
    fields: Fields = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="File to write; else stdout.",
            show_default=False,
            callback=writable,
        ),
    ] = None,
    url: Url = None,
    database: Database = None,
    as_json: AsJson = False,
) -> None:
    """Print recorded trials, oldest first, including failed ones; with --json one per line.

    With --format, --fields or --output they are a table of plain columns for other programs.
    """
    filters = _filters(problem, dtype, layout, batch, device, phase, job)
    if winners and (url or problem or phase or job):
        raise MisuseError("--winners goes with --dtype, --layout, --device and --database only")
    if unanswered:
        if winners or filters or url or form or fields or output:
            raise MisuseError("--unanswered goes with --limit, --database and --json only")
        _show_unanswered(limit, database, as_json)
        return
    if not (form or fields or output):
        (_show_winners if winners else _show_trials)(filters, limit, url, database, as_json)
        return
    if as_json:
        raise MisuseError("--json is whole documents; plain columns are --format jsonl")
    from service.http import tables

    written = format_of(form, output)
    source: tables.Table[Any] = tables.WINNERS if winners else tables.TRIALS
    columns = fields_of(source, fields)
    if url:
        with connect(url) as client:
            trials = client.results(limit=limit, fields=",".join(columns), **filters)
            rows = [{name: trial.get(name) for name in columns} for trial in trials]
    else:
        found = (_winners if winners else _trials)(filters, limit, database)
        rows = source.rows(found, columns)
    send(write(source, rows, columns, written), output)
    _count(rows, limit, "rows")


def _filters(
    problem: tuple[int, int, int] | None,
    dtype: str | None,
    layout: str | None,
    batch: int,
    device: str | None,
    phase: str | None,
    job: str | None,
) -> dict[str, Any]:
    """The filters of `GET /results`, checked; those not given are left out."""
    from gemmsmith.core.problem import Layout
    from gemmsmith.http.requests import fields_of
    from tuner.trial import Phase

    filters: dict[str, Any] = {
        "device": device,
        "phase": phase and member("phase", Phase, phase).value,
        "job": job,
    }
    if problem is not None:
        filters |= fields_of(
            problem_of(*problem, batch=batch, dtype=dtype or "bf16", layout=layout)
        )
    else:
        name, own = named_layout(dtype or "")
        layout = layout or own
        filters["layout"] = layout and member("layout", Layout, layout.lower()).value
        filters["dtype"] = dtypes_of([name])[0] if name else None
    return {name: value for name, value in filters.items() if value is not None}


def _trials(filters: dict[str, Any], limit: int, database: str | None) -> list[StoredTrial]:
    import msgspec

    from gemmsmith.core.problem import Layout, Problem
    from tuner.store import Store
    from tuner.trial import Phase

    problem = None
    if "m" in filters:
        names = ("m", "n", "k", "batch", "dtype", "layout")
        problem = msgspec.convert({name: filters[name] for name in names}, Problem)
    with Store.open(load_settings(database=database).database) as store:
        return store.trials(
            problem=problem,
            device=_device(store, filters),
            dtype=filters.get("dtype"),
            layout=Layout(filters["layout"]) if "layout" in filters else None,
            phase=Phase(filters["phase"]) if "phase" in filters else None,
            job=filters.get("job"),
            limit=limit,
        )


def _winners(filters: dict[str, Any], limit: int, database: str | None) -> list[Winner]:
    from gemmsmith.core.problem import Layout
    from tuner.store import Store

    with Store.open(load_settings(database=database).database) as store:
        return store.winners(
            device=_device(store, filters),
            dtype=filters.get("dtype"),
            layout=Layout(filters["layout"]) if "layout" in filters else None,
            limit=limit,
        )


def _device(store: Store, filters: dict[str, Any]) -> str | None:
    name = filters.get("device")
    return device_called(name, [model.slug for model in store.devices()]) if name else None


def _count(rows: Sized, limit: int, what: str) -> None:
    note(f"{len(rows)} {what}" + (f" (--limit {limit})" if len(rows) == limit else ""))


def _show_trials(
    filters: dict[str, Any], limit: int, url: str | None, database: str | None, as_json: bool
) -> None:
    import msgspec

    if url:
        with connect(url) as client:
            rows = list(client.results(limit=limit, **filters))
    else:
        rows = [
            {"id": stored.id, "created_at": stored.created_at, **msgspec.to_builtins(stored.trial)}
            for stored in _trials(filters, limit, database)
        ]
    if as_json:
        for row in rows:
            emit(row, line=True)
        return
    columns = ("problem", "kernel", "launch", "phase", "on", "µs", "± µs")
    understood = [known for row in rows if (known := _known(row)) is not None]
    table("", columns, understood, left=5)
    if len(understood) < len(rows):
        note(f"{len(rows) - len(understood)} trials need a newer gemmsmith, and are left out")
    _count(rows, limit, "trials")


def _known(row: dict[str, Any]) -> tuple[Any, ...] | None:
    """A trial as it is printed; None if this gemmsmith does not know what is in it."""
    from msgspec import ValidationError

    try:
        return _row(row)
    except (ValidationError, InvalidProblem, KeyError, TypeError, AttributeError):
        return None


def _row(row: dict[str, Any]) -> tuple[Any, ...]:
    import msgspec

    from gemmsmith.core.launch import Launch
    from gemmsmith.core.problem import Problem

    device = row["device"]["name"]
    statistics = row.get("statistics") or {}
    failure = row.get("failure") or {}
    launch = msgspec.convert(row["candidate"]["launch"], Launch)
    spread = None
    if statistics:
        spread = (statistics["ci_high_us"] - statistics["ci_low_us"]) / 2
    return (
        msgspec.convert(row["problem"], Problem),
        row["candidate"]["kernel"]["name"],
        launch.key,
        row["phase"],
        recording_of(device) if row["replayed"] else device.removeprefix("NVIDIA "),
        microseconds(statistics.get("median_us")) or failure.get("kind"),
        microseconds(spread),
    )


def _show_winners(
    filters: dict[str, Any], limit: int, _url: str | None, database: str | None, as_json: bool
) -> None:
    _show_found(_winners(filters, limit, database), limit, as_json)


def _show_unanswered(limit: int, database: str | None, as_json: bool) -> None:
    from tuner.store import Store

    with Store.open(load_settings(database=database).database) as store:
        _show_found(store.unanswered(limit), limit, as_json)


def _show_found(found: list[Winner], limit: int, as_json: bool) -> None:
    if as_json:
        for winner in found:
            emit(winner, line=True)
        return
    rows = [
        (
            winner.problem,
            winner.device.slug,
            recording_of(winner.device.name) if winner.replayed else winner.origin,
            winner.use,
            winner.candidate.kernel.name if winner.candidate else None,
            microseconds(winner.statistics.median_us if winner.statistics else None),
            microseconds(winner.baseline.median_us if winner.baseline else None),
            ratio(winner.speedup.median if winner.speedup else None),
        )
        for winner in found
    ]
    columns = (
        *("problem", "device", "origin", "use", "best CUTLASS kernel"),
        *("µs", "default µs", "speed-up"),
    )
    table("", columns, rows, left=5)
    _count(found, limit, "winners")
