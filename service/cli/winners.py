"""`gemmsmith export` and `gemmsmith import`: winners as files.

JSON lines without chosen fields are what `import` reads; tables are for other programs.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli import completion
from service.cli.files import Fields, FormatName, fields_of, format_of, send, write
from service.cli.options import (
    AsJson,
    Database,
    OnlyDevice,
    device_called,
    dtypes_of,
    load_settings,
)
from service.cli.output import MisuseError, emit, note, readable, say, writable

if TYPE_CHECKING:
    from service.settings import Settings
    from tuner.exchange import Imported


def export(
    path: Annotated[
        Path,
        typer.Argument(
            help="File to write, such as configs/winners/h200.jsonl; - is stdout.",
            callback=writable,
        ),
    ],
    device: OnlyDevice = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Only these element types.", autocompletion=completion.dtypes, show_default=False
        ),
    ] = None,
    form: FormatName = None,
    fields: Fields = None,
    database: Database = None,
    as_json: AsJson = False,
) -> None:
    """Write the current winners to a file, atomically."""
    from service.http import tables
    from tuner.exchange import export_winners, of_types
    from tuner.store import Store

    wanted = dtypes_of([dtype])[0] if dtype else None
    form_of = format_of(form, path)
    chosen = fields_of(tables.WINNERS, fields)
    with Store.open(load_settings(database=database).database) as store:
        if device:
            device = device_called(device, [model.slug for model in store.devices()])
        if form_of is tables.FileFormat.JSONL and fields is None:
            count = export_winners(store, path, device=device, dtype=wanted)
        else:
            found = of_types(store.winners(device=device), [wanted] if wanted else [])
            rows = tables.WINNERS.rows(found, chosen)
            send(write(tables.WINNERS, rows, chosen, form_of), path)
            count = len(rows)
    if as_json:
        emit({"file": str(path), "winners": count})
    else:
        say(f"{count} winners written to {path}")


def import_(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Winners files; - is stdin.", callback=readable),
    ],
    unsigned: Annotated[
        bool | None,
        typer.Option(
            "--unsigned",
            help="Also serve winners without a trusted signature.",
            show_default=False,
        ),
    ] = None,
    database: Database = None,
    as_json: AsJson = False,
) -> None:
    """Import winners from files into the database; winners measured here are kept.

    A file with an implausible winner is refused as a whole, with status 2. Winners without a
    trusted signature are stored, but not served.
    """
    from service import identity
    from service.cli.session import say_made
    from service.database import open_store
    from tuner.exchange import ExchangeError, import_winners

    settings = load_settings(database=database, unsigned=unsigned)
    trusted = identity.trusted(settings)
    counts = []
    with open_store(settings, on_made=say_made) as store:
        for path in paths:
            try:
                imported = import_winners(store, path, trusted, unsigned=settings.unsigned)
            except ExchangeError as error:
                raise MisuseError(str(error)) from error
            counts.append({"file": str(path), **asdict(imported)})
            if not as_json:
                say(f"{path}: {imported.added} winners added, {imported.kept} known already")
            if imported.unbelieved:
                note(f"{path}: {unbelieved(imported, settings)}")
    if as_json:
        emit({"files": counts})


def unbelieved(imported: Imported, settings: Settings) -> str:
    """What to do about winners that are stored and not answered."""
    keys = f"keys that are not trusted here ({', '.join(imported.keys)}), or by nobody"
    return (
        f"{imported.unbelieved} winners are stored and not served until they are measured here: "
        f"they are signed by {keys if imported.keys else 'nobody'}. To trust a key, put its "
        f"public half, NAME.pub, into {settings.trusted} and import again; to serve them "
        "anyway, import with --unsigned"
    )
