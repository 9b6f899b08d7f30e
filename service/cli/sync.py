"""`gemmsmith sync`: take over another service's winners, and compare them with those here."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli.options import AsJson, Database, OnlyDevice, blaming, load_settings
from service.cli.output import MisuseError, emit, note, say

if TYPE_CHECKING:
    from gemmsmith.signing import Trusted
    from tuner.trial import Winner


def sync(
    url: Annotated[str, typer.Argument(help="Address of the service, such as https://HOST:8000.")],
    device: OnlyDevice = None,
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
    """Import the winners that another service serves; winners measured here are kept.

    The rules are those of `gemmsmith import`: implausible winners are refused, and winners without
    a trusted signature are not served. If a trusted winner and one measured here differ beyond
    noise, a re-check is requested.
    """
    from service import identity
    from service.cli.session import say_made
    from service.cli.winners import unbelieved
    from service.database import open_store
    from tuner.exchange import ExchangeError, import_winners, write_winners
    from tuner.jobs import Queue
    from tuner.merge import Verdict, settle

    settings = load_settings(database=database, unsigned=unsigned)
    trusted = identity.trusted(settings)
    found, skipped = _winners(url, device)
    with open_store(settings, on_made=say_made) as store, tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "winners.jsonl"
        write_winners(path, found)
        try:
            imported = import_winners(store, path, trusted, unsigned=settings.unsigned)
        except ExchangeError as error:
            raise MisuseError(str(error).replace(str(path), url)) from error
        believed = [winner for winner in found if _believed(winner, trusted)]
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
        note(f"{url}: {unbelieved(imported, settings)}")


def _winners(url: str, device: str | None) -> tuple[list[Winner], int]:
    """What the service serves, with our own digests; and how many rows are not understood.

    Raises:
        GemmsmithError: the service is away or refuses.
    """
    import msgspec

    from gemmsmith.errors import InvalidProblem
    from tuner.store.statement import canonical, fingerprint
    from tuner.trial import Winner

    found, skipped = [], 0
    for row in _rows(url, device):
        try:
            winner = canonical(msgspec.convert(row, Winner))
        except (msgspec.ValidationError, InvalidProblem):
            skipped += 1
            continue
        found.append(replace(winner, digest=fingerprint(winner)))
    return found, skipped


def _rows(url: str, device: str | None) -> Iterator[dict[str, Any]]:
    """Rows of `GET /winners`, of one device model or of all that the service knows."""
    from gemmsmith.http.client import Client
    from gemmsmith.http.listing import rows

    class Reader(Client):
        """A client that reads listings which training code has no use for."""

        def rows(self, path: str, name: str, **filters: Any) -> Iterator[dict[str, Any]]:
            """The rows of a listing, page by page."""
            return self._sender.iterate(rows(self._session, path, name, filters, None))

    try:
        client = Reader(url)
    except ValueError as error:
        raise MisuseError(str(error)) from error
    with blaming(url), client:
        slugs = [device] if device else [model.slug for model in client.devices()]
        for slug in slugs:
            yield from client.rows("/winners", "winners", device=slug)


def _believed(winner: Winner, trusted: Trusted) -> bool:
    from tuner.store.statement import is_believed

    return is_believed(winner, trusted)
