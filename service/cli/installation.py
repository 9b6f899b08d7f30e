"""`gemmsmith doctor` and `gemmsmith db`: the state of this installation, and its database."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.options import Database, DataOptions, load_settings
from service.cli.output import MisuseError, Result, note, writable_bytes

if TYPE_CHECKING:
    from gemmsmith.signing import Trusted
    from service.settings import Settings
    from tuner.store import Store


_PACK = re.compile(r"[0-9a-f]{64}")


def doctor(
    url: Annotated[
        str | None,
        typer.Option(
            envvar="GEMMSMITH_URL",
            help="Service to check; default: where `gemmsmith serve` would listen.",
        ),
    ] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Also verify every stored winner, kernel and pack.")
    ] = False,
    *,
    data: DataOptions,
) -> Result:
    """Check GPU, driver, compilers, torch, CUTLASS, plugins, disk, database, recordings, service.

    Changes nothing. The status is 0 if this machine can serve answers, otherwise 1. With --deep, it
    is also 1 if stored data was altered.
    """
    from service.cli import checks

    settings = data.settings()
    results = checks.run(settings, url)
    can = checks.abilities(results)
    altered = _altered(settings) if deep and can["serve"] else []
    width = max(len(check.name) for check in results)
    lines = []
    for check in results:
        lines.append(f"{check.status:<8} {check.name:<{width}}  {check.detail}")
        if check.fix:
            lines.append(f"{'':<8} {'':<{width}}  → {check.fix}")
    lines.append("")
    for ability, possible in can.items():
        lines.append(f"{'yes' if possible else 'no':<8} {checks.ABILITIES[ability][0]}")
    lines += [f"wrong    {line}" for line in altered]
    document = {"checks": results, "can": can} | ({"wrong": altered} if deep else {})
    return Result(document, lines, failed=not can["serve"] or bool(altered))


def _altered(settings: Settings) -> list[str]:
    """A line for every stored winner, kernel and pack that is not what was stored.

    Raises:
        SettingsError: the trusted keys cannot be read.
        StoreError: the database cannot be used.
    """
    from service import identity
    from tuner.store import Store, current

    trusted = identity.trusted(settings)
    if current(settings.database) is None:  # nothing is stored yet
        return [*_packs(settings.packs, trusted)]
    with Store.open(settings.database) as store:
        altered = [*_winners(store, trusted), *_kernels(store)]
    return [*altered, *_packs(settings.packs, trusted)]


def _winners(store: Store, trusted: Trusted) -> Iterator[str]:
    from tuner.store.statement import altered

    for page in store.every_revision():
        for winner in page:
            if reason := altered(winner, trusted):
                where = f"{winner.problem} on {winner.device.slug}, revision {winner.revision}"
                yield f"winner {where}: {reason}"


def _kernels(store: Store) -> Iterator[str]:
    from tuner.claims import kernel_reason

    for name, kernel in store.dictionary.described():
        if kernel is None or kernel.name != name:
            yield f"kernel {name}: its description is another's, or cannot be read"
        elif reason := kernel_reason(kernel):
            yield f"kernel {reason}"


def _packs(folder: Path, trusted: Trusted) -> Iterator[str]:
    import msgspec

    from gemmsmith.errors import Untrusted
    from tuner.compile.manifest import Manifest

    for path in sorted(folder.glob("*.so")):
        if not _PACK.fullmatch(path.stem):
            continue
        with path.open("rb") as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
        if actual != path.stem:
            yield f"pack {path}: its bytes have the SHA-256 {actual}"
            continue
        try:
            manifest = msgspec.json.decode(path.with_suffix(".json").read_bytes(), type=Manifest)
            manifest.check(path.stem, trusted)
        except (OSError, msgspec.MsgspecError) as error:
            yield f"pack {path}: its manifest cannot be read: {error}"
        except Untrusted as error:
            yield f"pack {path}: {error}"


WithPacks = Annotated[
    bool,
    typer.Option(
        "--packs", help="Also the compiled packs (folder GEMMSMITH_PACKS), in FILE.packs.tar."
    ),
]


def upgrade(database: Database = None) -> Result:
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
    same, changed = f" is at schema {after} already", f": schema {before or 'none'} → {after}"
    document = {"database": where, "before": before, "after": after}
    return Result(document, where + (same if before == after else changed))


def current(database: Database = None) -> Result:
    """Print the database's schema and the one this version needs. Status 1 if they differ."""
    from tuner import store

    where = load_settings(database=database).database
    schema, needed = store.current(where), store.head()
    right = schema == needed
    lines = [f"{where}: schema {schema or 'none'}, this gemmsmith needs {needed}"]
    if not right and store.is_known(schema):
        lines.append(f"run: gemmsmith db upgrade --database {where}")
    elif not right:
        lines.append(
            "a newer gemmsmith wrote it: run that one, or put back a backup from before its "
            f"upgrade: gemmsmith db restore FILE --force --database {where}"
        )
    document = {"database": where, "current": schema, "head": needed, "up_to_date": right}
    return Result(document, lines, failed=not right)


def backup(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="A new file to write; - is stdout.", callback=writable_bytes
        ),
    ],
    packs: WithPacks = False,
    database: Database = None,
) -> Result:
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
    lines = [f"{file}: schema {schema}" + ("" if size is None else f", {size / 1e6:.1f} MB")]
    if number is not None:
        lines.append(f"{archived}: {number} packs, {archived.stat().st_size / 1e6:.1f} MB")
    document = {"file": str(file), "schema": schema, "bytes": size, "packs": number}
    return Result(document, lines)


def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file written by `db backup`.")],
    packs: WithPacks = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a database that is not empty.")
    ] = False,
    database: Database = None,
) -> Result:
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
    lines = [f"{where}: restored from {file}, schema {schema}"]
    if number is not None:
        lines.append(f"{settings.packs}: {number} packs")
    return Result({"database": where, "schema": schema, "packs": number}, lines)


def _packs_file(file: Path) -> Path:
    return file.with_name(f"{file.name}.packs.tar")
