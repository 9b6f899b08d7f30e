"""`gemmsmith export`, `import` and `sync`: winners to and from files, and from other services.

`import` reads JSON lines with all fields; other tables are for other programs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli import completion
from service.cli.options import AsJson, Database, OnlyDevice, Unsigned, dtypes_of, load_settings
from service.cli.output import MisuseError, emit, note, readable, say, writable
from service.cli.results import TableOptions, write_table
from service.cli.session import blaming, device_called, say_made

if TYPE_CHECKING:
    from service.settings import Settings
    from tuner.exchange import Imported
    from tuner.trial import Winner


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
    *,
    columns: TableOptions,
    database: Database = None,
    as_json: AsJson = False,
) -> None:
    """Write the current winners to a file, atomically."""
    from service.http import tables
    from tuner.exchange import export_winners, of_types
    from tuner.store import Store

    dtypes = dtypes_of([dtype])[:1] if dtype else []
    form = columns.format_of(path)
    chosen = columns.columns_of(tables.WINNERS)
    with Store.open(load_settings(database=database).database) as store:
        if device:
            device = device_called(device, [model.slug for model in store.devices()])
        if form is tables.FileFormat.JSONL and columns.fields is None:
            count = export_winners(store, path, device=device, dtype=next(iter(dtypes), None))
        else:
            rows = tables.WINNERS.rows(of_types(store.winners(device=device), dtypes), chosen)
            write_table(tables.WINNERS, rows, chosen, form, path)
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
    unsigned: Unsigned = None,
    database: Database = None,
    as_json: AsJson = False,
) -> None:
    """Import winners from files into the database; winners measured here are kept.

    A file with an implausible winner is refused as a whole, with status 2. Winners without a
    trusted signature are stored, but not served.
    """
    from service import identity
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
                note(f"{path}: {_unbelieved(imported, settings)}")
    if as_json:
        emit({"files": counts})


def _unbelieved(imported: Imported, settings: Settings) -> str:
    """What to do about winners that are stored and not served."""
    keys = f", or by keys that are not trusted here ({', '.join(imported.keys)})"
    return (
        f"{imported.unbelieved} winners are stored and not served until they are measured here: "
        f"they are not signed{keys if imported.keys else ''}. To trust a key, put its "
        f"public half, NAME.pub, into {settings.trusted} and import again; to serve them "
        "anyway, import with --unsigned"
    )


def sync(
    url: Annotated[str, typer.Argument(help="Address of the service, such as https://HOST:8000.")],
    device: OnlyDevice = None,
    unsigned: Unsigned = None,
    database: Database = None,
    as_json: AsJson = False,
) -> None:
    """Import the winners that another service serves; winners measured here are kept.

    The rules are those of `gemmsmith import`: implausible winners are refused, and winners without
    a trusted signature are not served. If a trusted winner and one measured here differ beyond
    noise, a re-check is requested.
    """
    from service import identity
    from service.database import open_store
    from tuner.exchange import ExchangeError, import_winners, write_winners
    from tuner.jobs import Queue
    from tuner.merge import Verdict, settle
    from tuner.store.statement import is_believed

    settings = load_settings(database=database, unsigned=unsigned)
    trusted = identity.trusted(settings)
    winners, skipped = _winners(url, device)
    with open_store(settings, on_made=say_made) as store, tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "winners.jsonl"
        write_winners(path, winners)
        try:
            imported = import_winners(store, path, trusted, unsigned=settings.unsigned)
        except ExchangeError as error:
            # The message names the temporary file, of which the user knows nothing.
            raise MisuseError(str(error).replace(str(path), url)) from error
        believed = [winner for winner in winners if is_believed(winner, trusted)]
        verdicts, rechecks = settle(store, Queue(store), believed)
    counts = {str(verdict): verdicts[verdict] for verdict in Verdict}
    if as_json:
        emit(
            {
                "url": url,
                **asdict(imported),
                "not_understood": skipped,
                "compared": counts,
                "rechecks": [job.id for job in rechecks],
            }
        )
        return
    say(f"{url}: {imported.added} winners added, {imported.kept} known already")
    compared = ", ".join(f"{number} {verdict}" for verdict, number in counts.items() if number)
    say(f"compared with those here: {compared or 'none'}; {len(rechecks)} re-checks requested")
    if skipped:
        note(f"{skipped} winners need a newer gemmsmith, and were skipped")
    if imported.unbelieved:
        note(f"{url}: {_unbelieved(imported, settings)}")


def _winners(url: str, device: str | None) -> tuple[list[Winner], int]:
    """The winners that the service serves, with digests made here; and how many were skipped.

    Rows that this version does not understand are skipped.

    Raises:
        GemmsmithError: the service is away or refuses.
    """
    import msgspec

    from gemmsmith.errors import InvalidProblem
    from tuner.store.statement import canonical, fingerprint
    from tuner.trial import Winner

    winners, skipped = [], 0
    for row in _rows(url, device):
        try:
            winner = canonical(msgspec.convert(row, Winner))
        except (msgspec.ValidationError, InvalidProblem):
            skipped += 1
            continue
        winners.append(replace(winner, digest=fingerprint(winner)))
    return winners, skipped


def _rows(url: str, device: str | None) -> Iterator[dict[str, Any]]:
    """Rows of `GET /winners`, of this device model or of all that the service knows."""
    from gemmsmith.http.client import Client
    from gemmsmith.http.listing import rows

    class Reader(Client):
        """A client that reads listings for which training code has no use."""

        def rows(self, path: str, name: str, **filters: Any) -> Iterator[dict[str, Any]]:
            return self._sender.iterate(rows(self._session, path, name, filters, None))

    try:
        client = Reader(url)
    except ValueError as error:
        raise MisuseError(str(error)) from error
    with blaming(url), client:
        slugs = [device] if device else [model.slug for model in client.devices()]
        for slug in slugs:
            yield from client.rows("/winners", "winners", device=slug)
