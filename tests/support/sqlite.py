"""An empty SQLite store with the newest schema. It is migrated once, because a migration takes
longer than most tests."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from tuner.store import upgrade


@cache
def empty_store() -> bytes:
    """The file that `upgrade` creates."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "empty.db")
        upgrade(f"sqlite:///{path}")
        return path.read_bytes()
