"""The figures that come from the database, for scrapes that must not wait for it.

One thread reads them, when somebody asks and it is not reading already. Who asks waits `PATIENCE_S`
for it and gets what was read last: on a large database the first reading takes seconds, and a
database that is locked or gone must not take the other figures with it. `read_at` says how old they
are.

The workers' figures come from here too, not from the workers: the database has those of every
worker on every machine, from before this service was started as well, and a worker needs no port.
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
    """What was read last; close it before the store.

    Attributes:
        jobs, records: None until they were read once.
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
        """Have them read, and wait so long for it."""
        with self._lock:
            if self._stopping.is_set():
                return
            if self._reading is None or self._reading.done():
                self._reading = self._pool.submit(self._read)
            reading = self._reading
        wait([reading], patience_s)

    def close(self) -> None:
        """Stop reading."""
        with self._lock:
            self._stopping.set()
        self._pool.shutdown()

    def _read(self) -> None:
        try:
            self.jobs = self._watch.read()
            records = self._totals.read(self._stopping.is_set)
        except Exception as error:  # nobody asks this thread what it raised
            fault = not isinstance(error, StoreError)
            log.warning("metrics not read", error=str(error), exc_info=fault)
            return
        if records is not None:
            self.records = records
            self.read_at = time.time()
