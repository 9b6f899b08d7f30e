"""Choosing on the hot path: one dictionary read per call, even while the service is away.

A `Lookup` holds the current snapshot. It remembers every result, None too, until a newer snapshot
replaces the current one. Refreshing never raises: while the service is away the last snapshot
stays, and the log `gemmsmith` says so once per outage. A pinned lookup keeps its snapshot for good,
as the ranks of one job need (`gemmsmith.distributed`): they would refresh at different moments, and
choose differently in between.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import Self

from gemmsmith.answers.snapshot import Choice, Snapshot
from gemmsmith.errors import InvalidProblem
from gemmsmith.http.client import Client
from gemmsmith.http.requests import problem_of

log = logging.getLogger("gemmsmith")

INTERVAL_S = 60.0
"""How often a snapshot is refreshed: winners change when a tuning job ends, in minutes."""

CAPACITY = 65_536
"""Problems remembered, about 16 MB. Beyond that all are forgotten, and looked up again in 20 µs
each. Only a program whose every step has new sizes gets there."""

Fetch = Callable[[Snapshot], Snapshot]
"""Gets the newest snapshot. Takes the known snapshot, and returns it if nothing has changed."""

_Key = tuple[str, str, int, int, int, int]


class Lookup:
    """Looks up winners in a snapshot in memory. Safe to share between threads.

    Args:
        snapshot: the winners.
        fetch: gets a newer snapshot; None: there is no source of newer ones.
        interval: seconds between refreshes by a background thread, which ends with this object;
            None: only when `refresh` is called.
        pin: keep `snapshot`; never refresh.
        capacity: number of problems whose results are cached.
        url: of the service whose winners they are, for messages; None: of no service.

    Attributes:
        pinned: whether the snapshot is never refreshed.
        on_swap: called after each change of the snapshot.

    Raises:
        ValueError: the interval or the capacity is invalid.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        *,
        fetch: Fetch | None = None,
        interval: float | None = None,
        pin: bool = False,
        capacity: int = CAPACITY,
        url: str | None = None,
    ) -> None:
        if interval is not None and not 0 < interval < threading.TIMEOUT_MAX:
            raise ValueError(f"interval must be a positive number of seconds, got {interval}")
        if capacity < 1:
            raise ValueError(f"capacity must be 1 or more, got {capacity}")
        self.pinned, self.url = pin, url
        self.on_swap: Callable[[], None] = lambda: None
        self._fetch = fetch
        self._capacity = capacity
        self._refreshing = threading.Lock()
        self._complained = False
        self._stop = threading.Event()
        self._interval = None if fetch is None or pin else interval
        self._swap(snapshot)
        self._start()
        _lookups.add(self)

    def _start(self) -> None:
        """Begin to refresh in the background, if there is an interval."""
        self._has_forked = False
        if self._interval is not None and not self._stop.is_set():
            stop = self._stop
            threading.Thread(
                target=_refresh_now_and_then,
                args=(weakref.ref(self, lambda _: stop.set()), stop, self._interval),
                name="gemmsmith-refresh",
                daemon=True,
            ).start()

    def _forked(self) -> None:
        """Now in a forked child, which has none of its parent's threads, but their locks."""
        # The thread begins again when something is looked up, since most children never do.
        self._refreshing = threading.Lock()
        self._has_forked = True
        self._swap(self.snapshot)  # nothing is remembered: what is looked up next is a miss

    @classmethod
    def of(
        cls,
        client: Client,
        device: str | None = None,
        *,
        interval: float | None = INTERVAL_S,
        pin: bool = False,
    ) -> Self:
        """A lookup in the service's winners for `device`, a device model's slug.

        Raises:
            as `Client.snapshot`, where the service is away and no earlier snapshot is cached.
        """
        return cls(
            client.snapshot(device),
            fetch=lambda known: client.snapshot(known.device, known=known),
            interval=interval,
            pin=pin,
            url=client.url,
        )

    @property
    def snapshot(self) -> Snapshot:
        return self._current[0]

    def lookup(
        self, dtype: str, layout: str, m: int, n: int, k: int, batch: int = 1
    ) -> Choice | None:
        """What to run for `D[m,n] = A[m,k] · B[k,n]`; None means torch's own operator.

        As `Snapshot.find`. It also returns None for an empty product or an unknown type, so that
        nothing is raised in a training step.
        """
        try:
            return self._choices[dtype, layout, m, n, k, batch]
        except KeyError:
            return self._miss((dtype, layout, m, n, k, batch))

    def _miss(self, key: _Key) -> Choice | None:
        if self._has_forked:
            self._start()
        # Read once: what this snapshot says is remembered beside this snapshot only.
        snapshot, choices = self._current
        dtype, layout, m, n, k, batch = key
        try:
            problem = problem_of(m, n, k, batch=batch, dtype=dtype, layout=layout)
        except InvalidProblem:
            choice = None
        else:
            choice = snapshot.find(problem)
        if len(choices) >= self._capacity:
            choices.clear()
        choices[key] = choice
        return choice

    def _swap(self, snapshot: Snapshot) -> None:
        choices: dict[_Key, Choice | None] = {}
        # One assignment: a call sees the old snapshot or the new one, never a mixture.
        self._current = (snapshot, choices)
        self._choices = choices  # one attribute less to read on every call

    def refresh(self) -> bool:
        """Fetch the newest snapshot; returns whether it has changed. Does nothing if pinned.

        Never raises: errors are logged, once until it works again.
        """
        if self.pinned or self._fetch is None:
            return False
        with self._refreshing:  # a slow answer must not replace a newer one
            known = self.snapshot
            try:
                newest = self._fetch(known)
            except Exception as error:  # noqa: BLE001 - nothing here may end a training run
                if not self._complained:
                    self._complained = True
                    log.warning("winners stay at snapshot %s: %s", known.revision[:16], error)
                return False
            self._complained = False
            if newest == known:
                return False
            self._swap(newest)
            self.on_swap()
        log.info("winners are now snapshot %s of %s", newest.revision[:16], newest.device)
        return True

    def close(self) -> None:
        """Stop refreshing in the background; the snapshot stays in use."""
        self._stop.set()


def _refresh_now_and_then(
    reference: weakref.ref[Lookup], stop: threading.Event, interval: float
) -> None:
    # Holds no lookup while it waits: when the program drops the lookup, this thread ends.
    while not stop.wait(interval):
        lookup = reference()
        if lookup is None:
            return
        lookup.refresh()
        del lookup


_lookups: weakref.WeakSet[Lookup] = weakref.WeakSet()


def _in_child() -> None:
    for lookup in _lookups:
        lookup._forked()


os.register_at_fork(after_in_child=_in_child)
