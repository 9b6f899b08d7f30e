"""Makes a database with a million winners in half a minute, to measure what its size costs.

SQL copies the shipped winners: each new problem gets a copy of one of them, so that rows are as
large as real ones. A copy's record has no device (its row's counts), so that it cannot be
recognised as altered. The problems are a grid of multiples of 64, so dense that a lookup's
neighbourhood is as large as it can be.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterable
from pathlib import Path

from gemmsmith.core.problem import Layout, Problem
from gemmsmith.signing import Trusted
from tuner.exchange import import_winners
from tuner.store import Store

TRUSTED = Path(__file__).parents[1] / "configs" / "trusted"
STEP = 64
SIDE = 100
"""Numbers of sizes of M and of N; K has as many as needed."""

_PROBLEMS = """
WITH RECURSIVE counted(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM counted WHERE i + 1 < :count),
sized AS (
    SELECT i, :step * (1 + i % :side) AS m, :step * (1 + i / :side % :side) AS n,
           :step * (1 + i / (:side * :side)) AS k
    FROM counted)
INSERT OR IGNORE INTO problems (id, operation, dtype, layout, batch, m, n, k, lg_m, lg_n, lg_k)
SELECT :kinds + 1 + i, kind.operation, kind.dtype, kind.layout, 1, sized.m, sized.n, sized.k,
       lg(sized.m), lg(sized.n), lg(sized.k)
FROM sized JOIN problems AS kind ON kind.id = 1 + i % :kinds
"""

_WINNERS = """
INSERT INTO winners (problem_id, device_id, environment_id, kernel_id, revision, sequence,
    is_current, pinned, origin, digest, use, median_us, speedup, launch, record, replayed, pack,
    promoted_at, job)
SELECT problems.id, device_id, environment_id, kernel_id, 1, problems.id + :sequence,
    1, 0, origin, hex(randomblob(16)), use, median_us, speedup, launch,
    json_remove(record, '$.device'), replayed, pack,
    promoted_at, job
FROM problems JOIN winners AS kind ON kind.problem_id = 1 + (problems.id - 1) % :kinds
WHERE problems.id > :kinds ORDER BY problems.id
"""


def take(store: Store, files: Iterable[Path]) -> None:
    trusted = Trusted.load(TRUSTED)
    for file in files:
        import_winners(store, file, trusted)


def fill(path: Path, shipped: list[Path], count: int) -> None:
    """Make the database at `path` with the `shipped` winners and about `count` copies."""
    with Store.open(f"sqlite:///{path}", create=True) as store:
        take(store, shipped)
    database = sqlite3.connect(path)
    database.create_function("lg", 1, math.log2, deterministic=True)
    database.execute("PRAGMA synchronous = OFF")  # after a power cut, the benchmark is run again
    (kinds,) = database.execute("SELECT max(id) FROM problems").fetchone()
    (sequence,) = database.execute("SELECT max(sequence) FROM winners").fetchone()
    sizes = {"count": count, "step": STEP, "side": SIDE, "kinds": kinds}
    with database:
        database.execute(_PROBLEMS, sizes)
        database.execute(_WINNERS, {"kinds": kinds, "sequence": sequence})
    database.close()


def sample(path: Path, count: int) -> list[Problem]:
    """Return `count` of the database's problems, evenly spread."""
    database = sqlite3.connect(path)
    (last,) = database.execute("SELECT max(id) FROM problems").fetchone()
    rows = database.execute(
        "SELECT m, n, k, batch, dtype, layout FROM problems WHERE id % ? = 0 LIMIT ?",
        (max(1, last // count), count),
    ).fetchall()
    database.close()
    return [
        Problem(m=m, n=n, k=k, batch=batch, dtype=dtype, layout=Layout(layout))
        for m, n, k, batch, dtype, layout in rows
    ]
