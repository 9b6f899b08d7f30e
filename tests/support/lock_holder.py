"""Holds the database's lock: `python -m tests.support.lock_holder URL SECONDS`.

On SQLite this blocks all writers, on PostgreSQL also all readers of jobs. Prints "held", and
"let go" at the end.
"""

from __future__ import annotations

import sys
import time
from contextlib import closing

from sqlalchemy import text

from tuner.store.database import Database


def main(url: str, seconds: float) -> None:
    with closing(Database(url)) as database, database.connect() as connection:  # BEGIN IMMEDIATE
        if not database.is_sqlite:
            connection.execute(text("LOCK TABLE jobs IN ACCESS EXCLUSIVE MODE"))
        sys.stdout.write("held\n")
        sys.stdout.flush()
        time.sleep(seconds)
    sys.stdout.write("let go\n")


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
