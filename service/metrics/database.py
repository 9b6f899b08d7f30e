"""Figures from the database, for scrapes that must not wait for it.

A scrape starts a reading in a thread, unless one runs already, waits `PATIENCE_S` for it, and
takes the last figures that were read. On a large database the first reading takes seconds, and a
database that is locked or gone must not block the other figures. `read_at` says how old the figures
are.

Figures about workers come from the database too, not from the workers: it has those of every worker
on every machine, also from before this service started, and a worker needs no port.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait

import structlog

from tuner.errors import StoreError
from tuner.jobs.figures import JobFigures, Watch
from tuner.store import Store
from tuner.store.totals import RecordTotals, Totals

log = structlog.get_logger("gemmsmith.service")

PATIENCE_S = 0.05


class Figures:
    """The figures of the last reading. Close this before the store.

    Attributes:
        jobs, records: None before the first reading.
        read_at: Unix time of the last reading that succeeded.
    """

    def __init__(self, store: Store) -> None:
        self.jobs: JobFigures | None = None
        self.records: RecordTotals | None = None
        self.read_at: float | None = None
        self._watch = Watch(store.database)
        self._totals = Totals(store.database)
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="figures")
        self._reading: Future[None] | None = None

    def refresh(self, patience_s: float = PATIENCE_S) -> None:
        """Start a reading if none runs, and wait for it at most `patience_s`."""
        with self._lock:
            if self._stopping.is_set():
                return
            if self._reading is None or self._reading.done():
                self._reading = self._pool.submit(self._read)
            reading = self._reading
        wait([reading], patience_s)

    def close(self) -> None:
        with self._lock:
            self._stopping.set()
        self._pool.shutdown()

    def _read(self) -> None:
        try:
            self.jobs = self._watch.read()
            records = self._totals.read(self._stopping.is_set)
        except Exception as error:  # no caller sees what this thread raises
            fault = not isinstance(error, StoreError)
            log.warning("metrics not read", error=str(error), exc_info=fault)
            return
        if records is not None:
            self.records = records
            self.read_at = time.time()
