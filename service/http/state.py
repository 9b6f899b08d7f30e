"""What the requests of one application share: opened at start, closed at the end."""

from __future__ import annotations

import threading
from typing import Annotated

from fastapi import Depends, Request

from service import identity
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
from service.metrics.database import Figures
from service.metrics.prometheus import Metrics
from service.report.glance import Glances
from service.settings import Settings
from service.worker.gpu import usable_gpu
from tuner.compile.artifacts import ArtifactStore
from tuner.errors import StoreError
from tuner.jobs import Queue
from tuner.jobs.news import News
from tuner.store import Store

SnapshotRequest = tuple[str, Arch | None, str | None, Abilities]
"""A client's name, and the architecture, device and abilities that it asks for."""


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
        access: identifies who makes a request, and checks whether they may.
        streams: what event streams are fed by.
        readiness: checks whether all is well.
        denials: what was denied, on its way into the audit.
        stopping: set when the server begins to stop; event streams then end, and their clients
            resume with `Last-Event-ID` at the next server.

    Raises:
        SettingsError: the keys cannot be used.
    """

    def __init__(self, settings: Settings, store: Store) -> None:
        limits = Limits.of(settings)
        self.settings = settings
        self.store = store
        self.signer = identity.signer(settings)  # first: its own packs are believed
        self.artifacts = ArtifactStore(settings.packs, trusted=identity.trusted_packs(settings))
        self.queue = Queue(store, limit=settings.queue_limit)
        self.catalogue = Catalogue(store.devices, usable_gpu(), settings.default_model)
        self.answers = Answers(settings.answers_kept)
        self.watcher = StoreWatcher(store, self.answers, self.catalogue)
        self.metrics = Metrics(Figures(store), settings.volumes())
        self.metrics.answers_kept.set_function(self.answers.__len__)
        self.reader = AnswerReader(
            store=store, chart=Chart(store), answers=self.answers, metrics=self.metrics
        )
        self.access = Doorkeeper(
            store.keys, required=settings.keys_required, job_limit=settings.key_job_limit
        )
        self.denials = Denials(store.audit)
        self.in_progress = Shares(limits.of_key, too_many_requests)
        self.lookups = Lookups(settings.lookups_limit)
        self.snapshots = Snapshots(store, self.catalogue, self.artifacts, self.signer)
        self.newest_snapshot = OncePerTurn(self._newest_snapshot)
        self.glances = Glances(store)
        self.readiness = Readiness(settings.database, settings.packs)
        self.stopping = threading.Event()
        self.streams = Streams(
            self.queue,
            News(store.database),
            limits,
            catch_up=self.catch_up,
            stopping=self.stopping,
            poll_s=settings.events_poll_s,
            heartbeat_s=settings.events_heartbeat_s,
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
