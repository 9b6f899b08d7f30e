"""The database as this installation makes it: at this version's schema, with the shipped winners.

Whatever creates a database does it here, so that the first lookup of all finds what came with the
program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from gemmsmith.signing import Signer
from gemmsmith.winners import installed
from service import identity
from service.settings import Settings
from tuner import store as stores
from tuner.exchange import Imported, import_winners
from tuner.store import Store


def prepare(settings: Settings) -> list[tuple[Path, Imported]]:
    """Make the database or bring it to this version's schema, and load the shipped winners.

    Kernel packs that were installed with pip are taken in as well. Safe to repeat: what is known
    already is kept.

    Returns:
        Each file of shipped winners, with what became of them.

    Raises:
        StoreError: the database cannot be used.
        ExchangeError: a file of winners that is none.
        SettingsError: the keys cannot be used.
    """
    stores.upgrade(settings.database)
    with Store.open(settings.database) as store:
        loaded = list(_load(settings, store))
        if installed.folders():
            from service.worker.builder import open_artifacts

            open_artifacts(settings, store)  # takes them in
        return loaded


def open_store(
    settings: Settings,
    *,
    signer: Signer | None = None,
    on_made: Callable[[int], None] = lambda _: None,
) -> Store:
    """Open the database; where there is none yet, make it first.

    Args:
        settings: which database, and where the shipped winners are.
        signer: signs the winners that are measured here.
        on_made: gets the number of winners in a database that was made.

    Raises:
        StoreError, ExchangeError, SettingsError: as `prepare`; of a database that is there, as
            `Store.open`.
    """
    if stores.current(settings.database) is None:
        on_made(sum(imported.added for _, imported in prepare(settings)))
    return Store.open(settings.database, signer=signer)


def _load(settings: Settings, store: Store) -> Iterator[tuple[Path, Imported]]:
    trusted = identity.trusted(settings)
    for path in sorted(settings.winners.glob("*.json*")):
        yield path, import_winners(store, path, trusted, unsigned=settings.unsigned)
