"""`gemmsmith winners`, `export`, `import` and `sync`: which winners are served, and their exchange.

Winners go to and from files, and come from other services. `import` reads JSON lines with all
fields; other tables are for other programs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gemmsmith.core.device import recording_of
from service.cli.options import (
    Database,
    DeviceSlug,
    Limit,
    OnlyDevice,
    OnlyDType,
    ProblemOptions,
    SourceOptions,
    Unsigned,
    dtypes_of,
    load_settings,
)
from service.cli.output import TIMES, MisuseError, Result, note, readable, table, times, writable
from service.cli.results import TableOptions, write_table
from service.cli.session import blaming, device_of, existing_store, made_store, model_of, opened

if TYPE_CHECKING:
    from gemmsmith.answers.history import Revision
    from gemmsmith.core.config import Config
    from gemmsmith.core.problem import Problem
    from service.settings import Settings
    from tuner.exchange import Imported
    from tuner.store import Store
    from tuner.store.revisions import WinnerRevision as Stored
    from tuner.trial import Winner


def history(
    shape: ProblemOptions,
    device: DeviceSlug = None,
    limit: Limit = None,
    *,
    source: SourceOptions,
) -> Result:
    """List all winners of M N K, newest first."""
    problem = shape.problem
    with opened(source, _LocalWinners) as winners:
        revisions = winners.history(problem, device=device, limit=limit)
    title = f"{problem} on {revisions[0].answer.device.name}"
    columns = (
        *("revision", "served", "origin", "status", "use", "tile"),
        *(*TIMES, "driver", "promoted"),
    )
    return Result(
        {"revisions": revisions}, lambda: table(title, columns, map(_row, revisions), left=6)
    )


def pin(
    shape: ProblemOptions,
    revision: Annotated[
        int, typer.Argument(metavar="REVISION", min=1, help="Its number in the history.")
    ],
    device: DeviceSlug = None,
    *,
    source: SourceOptions,
) -> Result:
    """Serve REVISION until it is unpinned, even if M N K is tuned, imported or re-checked."""
    problem = shape.problem
    with opened(source, _LocalWinners) as winners:
        return _served(winners.pin(problem, revision, device=device))


def unpin(
    shape: ProblemOptions,
    device: DeviceSlug = None,
    *,
    source: SourceOptions,
) -> Result:
    """Serve the newest winner of the best origin again: measured, imported, then replayed."""
    problem = shape.problem
    with opened(source, _LocalWinners) as winners:
        return _served(winners.unpin(problem, device=device))


def rollback(
    shape: ProblemOptions,
    device: DeviceSlug = None,
    *,
    source: SourceOptions,
) -> Result:
    """Serve and pin the previous revision. A second rollback undoes the first."""
    problem = shape.problem
    with opened(source, _LocalWinners) as winners:
        return _served(winners.rollback(problem, device=device))


class _LocalWinners:
    """The local database, with the calls of a service's client."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store = store
        self._settings = settings

    def history(self, problem: Problem, *, device: str | None, limit: int | None) -> list[Revision]:
        from tuner.errors import NoSuchWinner

        slug = self._slug(device)
        revisions = self._store.revisions(problem, slug, limit=limit)
        if not revisions:
            raise NoSuchWinner(f"no winner is known for {problem} on {slug}; tune it first")
        return [self._for_client(revision) for revision in revisions]

    def pin(self, problem: Problem, revision: int, *, device: str | None) -> Revision:
        return self._for_client(self._store.pin(problem, self._slug(device), revision))

    def unpin(self, problem: Problem, *, device: str | None) -> Revision:
        return self._for_client(self._store.unpin(problem, self._slug(device)))

    def rollback(self, problem: Problem, *, device: str | None) -> Revision:
        return self._for_client(self._store.roll_back(problem, self._slug(device)))

    def _slug(self, device: str | None) -> str:
        return model_of(self._settings, device, self._store).slug

    def _for_client(self, revision: Stored) -> Revision:
        from gemmsmith.answers.history import Revision
        from service.lookup import find

        return Revision(
            answer=find.as_served(revision.winner, self._store.pack_for),
            origin=revision.origin,
            current=revision.current,
        )


def _served(revision: Revision) -> Result:
    answer = revision.answer
    served = f"revision {answer.revision} is served{', pinned' if answer.pinned else ''}"
    return Result(revision, f"{answer.problem} on {answer.device.name}: {served}")


def _row(revision: Revision) -> tuple[object, ...]:
    answer = revision.answer
    return (
        answer.revision,
        {True: "pinned", False: "yes"}[answer.pinned] if revision.current else "",
        recording_of(answer.recorded) if answer.recorded else revision.origin,
        "stale" if answer.stale else "",
        answer.use,
        _tile(answer.config) if answer.config else None,
        *times(answer),
        answer.environment.driver if answer.environment else None,
        answer.promoted_at,
    )


def _tile(config: Config) -> str | None:
    from gemmsmith.core.kernel import CutlassKernel

    kernel = config.kernel
    return "×".join(map(str, kernel.tile)) if isinstance(kernel, CutlassKernel) else None


def export(
    path: Annotated[
        Path,
        typer.Argument(
            help="File to write, such as configs/winners/h200.jsonl; - is stdout.",
            callback=writable,
        ),
    ],
    device: OnlyDevice = None,
    dtype: OnlyDType = None,
    *,
    columns: TableOptions,
    database: Database = None,
) -> Result:
    """Write the current winners to a file, atomically."""
    from service import tables
    from tuner.exchange import export_winners, of_types

    dtypes = dtypes_of([dtype])[:1] if dtype else []
    form = columns.format_of(path)
    chosen = columns.columns_of(tables.WINNERS)
    with existing_store(database) as store:
        if device:
            device = device_of(store, device)
        if form is tables.FileFormat.JSONL and columns.fields is None:
            count = export_winners(store, path, device=device, dtype=next(iter(dtypes), None))
        else:
            rows = tables.WINNERS.rows(of_types(store.winners(device=device), dtypes), chosen)
            write_table(tables.WINNERS, rows, chosen, form, path)
            count = len(rows)
    document = {"file": str(path), "winners": count}
    return Result(document, f"{count} winners written to {path}")


def import_(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Winners files; - is stdin.", callback=readable),
    ],
    unsigned: Unsigned = None,
    database: Database = None,
) -> Result:
    """Import winners from files into the database; winners measured here are kept.

    A file with an implausible winner is refused as a whole, with status 2. Winners without a
    trusted signature are stored, but not served.
    """
    settings = load_settings(database=database, unsigned=unsigned)
    imported: dict[str, Imported] = {}
    with made_store(settings) as store:
        for path in paths:
            try:
                imported[str(path)] = _import(store, path, settings, str(path))
            except MisuseError:
                for item in imported.items():  # these stay imported
                    note(_added(*item))
                raise
    files = [{"file": file, **asdict(counts)} for file, counts in imported.items()]
    return Result({"files": files}, [_added(*item) for item in imported.items()])


def _import(store: Store, path: Path, settings: Settings, source: str) -> Imported:
    """Import a file of winners from `source`, and note which are not served.

    Raises:
        MisuseError: the file is refused.
    """
    from service import identity
    from tuner.exchange import ExchangeError, import_winners

    trusted = identity.trusted(settings)
    try:
        imported = import_winners(store, path, trusted, unsigned=settings.unsigned)
    except ExchangeError as error:
        # `sync` imports a temporary file, of which the user knows nothing.
        raise MisuseError(str(error).replace(str(path), source)) from error
    if imported.unbelieved:
        keys = f", or by keys that are not trusted here ({', '.join(imported.keys)})"
        note(
            f"{source}: {imported.unbelieved} winners are stored and not served until they are "
            f"measured here: they are not signed{keys if imported.keys else ''}. To trust a key, "
            f"put its public half, NAME.pub, into {settings.trusted} and import again; to serve "
            "them anyway, import with --unsigned"
        )
    return imported


def _added(source: str, imported: Imported) -> str:
    return f"{source}: {imported.added} winners added, {imported.kept} known already"


def sync(
    url: Annotated[str, typer.Argument(help="Address of the service, such as https://HOST:8000.")],
    device: OnlyDevice = None,
    unsigned: Unsigned = None,
    database: Database = None,
) -> Result:
    """Import the winners that another service serves; winners measured here are kept.

    The rules are those of `gemmsmith import`: implausible winners are refused, and winners without
    a trusted signature are not served. If a trusted winner and one measured here differ beyond
    noise, a re-check is requested.
    """
    from service import identity
    from tuner.exchange import write_winners
    from tuner.jobs import Queue
    from tuner.merge import Verdict, settle
    from tuner.store.statement import is_believed

    settings = load_settings(database=database, unsigned=unsigned)
    trusted = identity.trusted(settings)
    winners, skipped = _winners(url, device)
    with made_store(settings) as store, tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "winners.jsonl"
        write_winners(path, winners)
        imported = _import(store, path, settings, url)
        believed = [winner for winner in winners if is_believed(winner, trusted)]
        verdicts, rechecks = settle(store, Queue(store), believed)
    counts = {str(verdict): verdicts[verdict] for verdict in Verdict}
    document = {
        "url": url,
        **asdict(imported),
        "not_understood": skipped,
        "compared": counts,
        "rechecks": [job.id for job in rechecks],
    }
    compared = ", ".join(f"{number} {verdict}" for verdict, number in counts.items() if number)
    requested = f"{len(rechecks)} re-checks requested"
    lines = [_added(url, imported), f"compared with those here: {compared or 'none'}; {requested}"]
    newer = f"{skipped} winners need a newer gemmsmith, and were skipped"
    return Result(document, lines, [newer] if skipped else [])


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
