"""The record: trials, winners, packs and jobs in SQLite or PostgreSQL."""

from tuner.store.database import parse_url, sqlite_path
from tuner.store.schema import current, head, is_known, upgrade
from tuner.store.store import Store
from tuner.store.trials import StoredTrial

__all__ = [
    "Store",
    "StoredTrial",
    "current",
    "head",
    "is_known",
    "parse_url",
    "sqlite_path",
    "upgrade",
]
