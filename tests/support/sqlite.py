"""An empty SQLite store at the newest schema: migrated once, because that takes longer than most
tests."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from tuner.store import upgrade


@cache
def empty_store() -> bytes:
    """What `upgrade` makes of no file."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "empty.db")
        upgrade(f"sqlite:///{path}")
        return path.read_bytes()
