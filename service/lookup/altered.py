"""Winners that were altered in the database, and so are not answered: told of once each."""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

from tuner.trial import Winner

log = structlog.get_logger("gemmsmith.service")


class Altered:
    """What was found altered. Threads share it.

    Args:
        count: called once for each.
    """

    def __init__(self, count: Callable[[], None]) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._known: set[tuple[object, ...]] = set()

    def note(self, winner: Winner) -> None:
        """Log and count a winner that is not what was put into the database."""
        found = (winner.problem, winner.device.slug, winner.revision)
        with self._lock:
            if found in self._known:
                return
            self._known.add(found)
        self._count()
        log.error(
            "a winner was altered in the database and is not answered; gemmsmith doctor --deep "
            "lists all such",
            problem=str(winner.problem),
            device=winner.device.slug,
            revision=winner.revision,
        )
