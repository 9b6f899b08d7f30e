"""`gemmsmith db`: the database's schema, backup and restore."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from service.cli.options import AsJson, Database, load_settings
from service.cli.output import MisuseError, emit, note, say, writable_bytes

WithPacks = Annotated[
    bool,
    typer.Option(
        "--packs", help="Also the compiled packs (folder GEMMSMITH_PACKS), in FILE.packs.tar."
    ),
]


def upgrade(database: Database = None, as_json: AsJson = False) -> None:
    """Create the database, or migrate it to the schema of this version. Safe to repeat.

    Also loads missing shipped winners.
    """
    from service.database import prepare
    from tuner import store

    settings = load_settings(database=database)
    where = settings.database
    before = store.current(settings.database)
    added = sum(imported.added for _, imported in prepare(settings))
    after = store.current(settings.database)
    if added:
        note(f"{added} shipped winners loaded")
    if as_json:
        emit({"database": where, "before": before, "after": after})
    elif before == after:
        say(f"{where} is at schema {after} already")
    else:
        say(f"{where}: schema {before or 'none'} → {after}")


def current(database: Database = None, as_json: AsJson = False) -> None:
    """Print the database's schema and the one this version needs. Status 1 if they differ."""
    from tuner import store

    where = load_settings(database=database).database
    schema, needed = store.current(where), store.head()
    if as_json:
        emit({"database": where, "current": schema, "head": needed, "up_to_date": schema == needed})
    else:
        say(f"{where}: schema {schema or 'none'}, this gemmsmith needs {needed}")
        if schema != needed and store.is_known(schema):
            say(f"run: gemmsmith db upgrade --database {where}")
        elif schema != needed:
            say(
                "a newer gemmsmith wrote it: run that one, or put back a backup from before its "
                f"upgrade: gemmsmith db restore FILE --force --database {where}"
            )
    if schema != needed:
        raise typer.Exit(1)


def backup(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="A new file to write; - is stdout.", callback=writable_bytes
        ),
    ],
    packs: WithPacks = False,
    database: Database = None,
    as_json: AsJson = False,
) -> None:
    """Write a consistent backup of the database to FILE, while everything runs.

    FILE is checked before it gets its name. For SQLite it is a database; PostgreSQL needs
    pg_dump and pg_restore.
    """
    from gemmsmith.files import is_stream
    from tuner.compile import ArtifactStore
    from tuner.compile.archive import archive
    from tuner.store.backup import backup as write

    settings = load_settings(database=database)
    archived = _packs_file(file)
    if packs and is_stream(file):
        raise MisuseError("--packs writes a second file beside FILE: name a file")
    if packs and archived.exists():
        raise MisuseError(f"{archived} exists already; name a new file")
    schema = write(settings.database, file)
    number = archive(ArtifactStore(settings.packs), archived) if packs else None
    size = None if is_stream(file) else file.stat().st_size
    if as_json:
        emit({"file": str(file), "schema": schema, "bytes": size, "packs": number})
        return
    say(f"{file}: schema {schema}" + ("" if size is None else f", {size / 1e6:.1f} MB"))
    if number is not None:
        say(f"{archived}: {number} packs, {archived.stat().st_size / 1e6:.1f} MB")


def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file written by `db backup`.")],
    packs: WithPacks = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a database that is not empty.")
    ] = False,
    database: Database = None,
    as_json: AsJson = False,
) -> None:
    """Replace the database with the backup FILE. Stop the service first.

    A backup of an older gemmsmith is upgraded. A newer or damaged one is refused, and nothing
    changes.
    """
    from tuner.compile import ArtifactStore
    from tuner.compile.archive import check, unarchive
    from tuner.store.backup import restore as put_back

    settings = load_settings(database=database)
    archived = _packs_file(file)
    for needed in (file, archived) if packs else (file,):
        if not needed.is_file():
            raise MisuseError(f"there is no file {needed}")
    if packs:
        check(archived)
    schema = put_back(settings.database, file, force=force)
    number = unarchive(archived, ArtifactStore(settings.packs)) if packs else None
    where = settings.database
    if as_json:
        emit({"database": where, "schema": schema, "packs": number})
        return
    say(f"{where}: restored from {file}, schema {schema}")
    if number is not None:
        say(f"{settings.packs}: {number} packs")


def _packs_file(file: Path) -> Path:
    return file.with_name(f"{file.name}.packs.tar")
