"""Creates the database: this version's schema, with the shipped winners in it.

Every program that creates a database does it here, so that the first lookup can already answer
with the shipped winners.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gemmsmith.signing import Signer
from service import identity
from service.settings import Settings
from tuner import store as stores
from tuner.exchange import Imported, import_winners
from tuner.store import Store


def prepare(settings: Settings) -> list[tuple[Path, Imported]]:
    """Create the database or upgrade its schema, and load the shipped winners.

    Safe to repeat: what the database has already is kept.

    Returns:
        Each file of shipped winners, with the result of its import.

    Raises:
        StoreError: the database cannot be used.
        ExchangeError: a file is not a file of winners.
        SettingsError: the keys cannot be used.
    """
    stores.upgrade(settings.database)
    with Store.open(settings.database) as store:
        trusted = identity.trusted(settings)
        return [
            (path, import_winners(store, path, trusted, unsigned=settings.unsigned))
            for path in sorted(settings.winners.glob("*.json*"))
        ]


def open_store(
    settings: Settings,
    *,
    signer: Signer | None = None,
    on_made: Callable[[int], None] = lambda _: None,
) -> Store:
    """Open the database, after `prepare` if it does not exist yet.

    Args:
        settings: which database, and where the shipped winners are.
        signer: signs the winners that are measured here.
        on_made: called with the number of loaded winners if the database was created.

    Raises:
        StoreError, ExchangeError, SettingsError: as `prepare` and `Store.open`.
    """
    if stores.current(settings.database) is None:
        on_made(sum(imported.added for _, imported in prepare(settings)))
    return Store.open(settings.database, signer=signer)
