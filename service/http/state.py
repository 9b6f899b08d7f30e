"""What the requests of one application share: opened at start, closed at the end."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from gemmsmith.signing import Signer
from service.http.access import Doorkeeper
from service.http.connections import Limits
from service.http.denials import Denials
from service.http.readiness import Readiness
from service.http.streams import Streams
from service.http.turns import Lookups, OncePerTurn, Shares, too_many_requests
from service.lookup.abilities import Abilities
from service.lookup.cache import Answers
from service.lookup.devices import Arch, Catalogue
from service.lookup.find import Chart
from service.lookup.reader import AnswerReader
from service.lookup.snapshots import Snapshots, WrittenSnapshot
from service.lookup.watcher import StoreWatcher
from service.metrics.prometheus import Metrics
from service.report.glance import Glances
from service.settings import Settings
from tuner.compile.artifacts import ArtifactStore
from tuner.errors import StoreError
from tuner.jobs import Queue
from tuner.jobs.news import News
from tuner.store import Store

SnapshotRequest = tuple[str, Arch | None, str | None, Abilities]
"""A client's name, and the architecture, device and abilities that it asks for."""


@dataclass(kw_only=True)
class State:
    """The store and what is built on it.

    Attributes:
        answers: what lookups were answered, while it is true; `watcher` sees to that.
        reader: answers lookups; its `chart` is drawn while the service is up.
        lookups: takes turns with them.
        in_progress: counts each client's requests that wait, are worked on or being answered.
        snapshots: all winners of a device model, as they are sent; `newest_snapshot` takes turns.
        glances: what the winners come to, added up.
        signer: signs what is handed on.
        access: tells who makes a request, and whether they may.
        streams: what event streams are fed by.
        readiness: tells whether all is well.
        denials: what was denied, on its way into the audit.
        stopping: set when the server begins to stop; event streams then end, and their clients
            resume with `Last-Event-ID` at the next server.
    """

    settings: Settings
    store: Store
    queue: Queue
    catalogue: Catalogue
    answers: Answers
    watcher: StoreWatcher
    metrics: Metrics
    artifacts: ArtifactStore
    signer: Signer
    access: Doorkeeper
    denials: Denials
    stopping: threading.Event = field(default_factory=threading.Event)
    reader: AnswerReader = field(init=False)
    lookups: Lookups = field(init=False)
    in_progress: Shares = field(init=False)
    snapshots: Snapshots = field(init=False)
    newest_snapshot: OncePerTurn[SnapshotRequest, WrittenSnapshot | None] = field(init=False)
    glances: Glances = field(init=False)
    streams: Streams = field(init=False)
    readiness: Readiness = field(init=False)

    def __post_init__(self) -> None:
        chart = Chart(self.store)
        self.reader = AnswerReader(
            store=self.store, chart=chart, answers=self.answers, metrics=self.metrics
        )
        limits = Limits.of(self.settings)
        self.in_progress = Shares(limits.of_key, too_many_requests)
        self.lookups = Lookups(self.settings.lookups_limit)
        self.snapshots = Snapshots(self.store, self.catalogue, self.artifacts, self.signer)
        self.newest_snapshot = OncePerTurn(self._newest_snapshot)
        self.glances = Glances(self.store)
        self.readiness = Readiness(self.settings.database, self.settings.packs)
        self.streams = Streams(
            self.queue,
            News(self.store.database),
            limits,
            catch_up=self.catch_up,
            stopping=self.stopping,
            poll_s=self.settings.events_poll_s,
            heartbeat_s=self.settings.events_heartbeat_s,
        )

    async def _newest_snapshot(self, request: SnapshotRequest) -> WrittenSnapshot | None:
        client, arch, device, abilities = request
        turns = self.lookups.snapshots
        return await turns.run(client, self.snapshots.newest, arch, device, abilities)

    def catch_up(self) -> None:
        """Let lookups show all changes until now, before any client learns of a change."""
        try:
            self.watcher.refresh()
        except StoreError:
            self.answers.clear()  # the changes are unknown, and the caller must not wait


async def _state(request: Request) -> State:
    state: State = request.app.state.service
    return state


Service = Annotated[State, Depends(_state)]
"""The shared state, as a parameter of a route."""
