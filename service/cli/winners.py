"""`gemmsmith export` and `gemmsmith import`: winners as files.

JSON lines without chosen fields are what `import` reads; tables are for other programs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from service.cli.files import Fields, FormatName, fields_of, format_of, send, write
from service.cli.options import AsJson, Database, dtypes_of, load_settings
from service.cli.output import CommandError, emit, say


def export(
    path: Annotated[
        Path, typer.Argument(help="File to write, such as configs/winners/h200.jsonl.")
    ],
    device: Annotated[
        str | None, typer.Option(help="Only this device model (its slug).", show_default=False)
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Only these element types.", show_default=False)
    ] = None,
    form: FormatName = None,
    fields: Fields = None,
    database: Database = None,
    as_json: AsJson = False,
) -> None:
    """Write the current winners to a file, atomically."""
    from service.http import tables
    from tuner.exchange import export_winners
    from tuner.store import Store

    wanted = dtypes_of([dtype])[0] if dtype else None
    form_of = format_of(form, path)
    chosen = fields_of(tables.WINNERS, fields)
    with Store.open(load_settings(database=database).database) as store:
        if device and device not in (known := [model.slug for model in store.devices()]):
            raise CommandError(
                f"no device {device!r} in the database; it has {', '.join(known) or 'none'}"
            )
        if form_of is tables.FileFormat.JSONL and fields is None:
            count = export_winners(store, path, device=device, dtype=wanted)
        else:
            rows = tables.WINNERS.rows(store.winners(device=device, dtype=wanted), chosen)
            send(write(tables.WINNERS, rows, chosen, form_of), path)
            count = len(rows)
    if as_json:
        emit({"file": str(path), "winners": count})
    else:
        say(f"{count} winners written to {path}")


def import_(
    paths: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Winners files.")],
    database: Database = None,
    as_json: AsJson = False,
) -> None:
    """Take the winners of files into the database; newer ones that it has already are kept.

    A file that cannot be read is refused whole.
    """
    from tuner.exchange import import_winners
    from tuner.store import Store

    counts = []
    with Store.open(load_settings(database=database).database, create=True) as store:
        for path in paths:
            imported = import_winners(store, path)
            counts.append({"file": str(path), "added": imported.added, "kept": imported.kept})
            if not as_json:
                say(f"{path}: {imported.added} winners added, {imported.kept} known already")
    if as_json:
        emit({"files": counts})
