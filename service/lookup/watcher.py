"""Keeps the answers in memory true: checks the store for changes, and drops what may be outdated.

A change by another process is noticed within `EVERY_S` plus the time of one check. `refresh` checks
at once, so that a client that knows of a pin or of the end of a job gets the new answer. While the
database does not answer, lookups are served from memory; the log says so once, and again when the
database is back.
"""

from __future__ import annotations

import threading
from typing import Self

import structlog

from service.lookup.cache import Answers
from service.lookup.devices import Catalogue
from tuner.errors import StoreError
from tuner.store import Store
from tuner.store.changes import Marks, newest

EVERY_S = 0.05
"""Time between checks; a check takes 0.4 ms on SQLite, whatever the number of winners."""

_MANY = 1000
"""With this many changed winners, everything is dropped: to compare would cost more."""

log = structlog.get_logger("gemmsmith.service")


class StoreWatcher:
    """A thread that checks the store while its context is entered.

    Args:
        answers: the memory that outdated answers are dropped from.
        catalogue: is read again if the store has a new device model.
    """

    def __init__(self, store: Store, answers: Answers, catalogue: Catalogue) -> None:
        self._store = store
        self._answers = answers
        self._catalogue = catalogue
        self._seen: Marks | None = None
        self._looking = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="answers", daemon=True)

    def __enter__(self) -> Self:
        """Check once, then from a thread.

        Raises:
            StoreError: the database cannot be read.
        """
        self.refresh()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def refresh(self) -> None:
        """Drop what has changed until now.

        Raises:
            StoreError: the database cannot be read; everything stays as it was.
        """
        with self._looking:
            now = self._store.changes.marks()
            if now != self._seen:
                self._drop(self._seen, now)
                self._seen = now  # last: what fails is tried again

    def _drop(self, seen: Marks | None, now: Marks) -> None:
        self._store.forget_kernels()  # a kernel's description may have been corrected
        if seen is None or (seen.devices, seen.gpus) != (now.devices, now.gpus):
            self._catalogue.known(refresh=True)  # which device is meant may change with it
            self._answers.clear()
            return
        if now.sequence != seen.sequence:
            changed = self._store.changes.winners_since(seen.sequence, _MANY)
            if now.sequence < seen.sequence or len(changed) == _MANY:
                self._answers.clear()
            else:
                self._answers.drop_changed(changed)
        if now.packs != seen.packs:
            packed = self._store.changes.packed()
            self._answers.drop_packed(
                {pack for pack, _ in packed},
                newest(packed),
            )

    def _run(self) -> None:
        answered = True
        while not self._stopping.wait(EVERY_S):
            try:
                self.refresh()
            # Any exception: if this thread ended, old answers would be served for ever.
            except Exception as error:
                if answered:
                    log.warning(
                        "the database does not answer; lookups are served from memory",
                        error=str(error),
                        exc_info=not isinstance(error, StoreError),
                    )
                answered = False
            else:
                if not answered:
                    log.info("the database answers again")
                answered = True
