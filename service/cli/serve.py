"""`gemmsmith serve`: prepares the database, serves HTTP, keeps a worker beside it, stops in order.

The worker is a process of its own, so a crash on the GPU never takes the service down. On SIGTERM
or SIGINT the server finishes its requests and ends event streams (their clients resume), then the
worker gets a SIGTERM, and the command waits for it. A port in use or an unusable database ends the
command before anything is started.
"""

from __future__ import annotations

import errno
import gc
import shlex
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import msgspec
import structlog
import uvicorn

from gemmsmith.core.problem import Problem
from service import database, identity, kernels, logging
from service.documents import best_url
from service.http.app import create_app
from service.http.connections import raise_file_limit
from service.http.server import server_config
from service.lookup.devices import Catalogue
from service.settings import Settings, SettingsError
from service.worker.gpu import usable_gpu
from service.worker.supervisor import WorkerSupervisor
from tuner.compile import ArtifactStore
from tuner.devices.recording import SUFFIX, first_problem
from tuner.errors import RecordingCorrupt
from tuner.signals import handled
from tuner.store import Store

log = structlog.get_logger("gemmsmith.serve")

SWITCH_S = 0.001
"""Seconds that a thread computes before another gets its turn. A request for a job waits for other
threads 20 times: beside two that make listings it took 193 ms with Python's 5 ms, and 145 ms with
this (two busy cores, 2026-11-26)."""

FALLBACK = Problem(m=4096, n=4096, k=4096)
"""The banner's lookup while there are no winners: a 404 that says how to tune it."""


def serve(settings: Settings, *, worker: bool = False) -> int:
    """Run the service until SIGTERM or SIGINT; the exit status.

    Once it answers, a banner with lines to try is printed.

    Raises:
        SettingsError: the address cannot be bound, or requests need API keys and none exist.
        StoreError: the database cannot be used.
    """
    logging.configure(json=settings.log_json)
    raise_file_limit()
    sys.setswitchinterval(SWITCH_S)
    # The port is bound first: a second `serve` must fail before it touches the database.
    with _listening(settings) as listener:
        prepare(settings)
        supervisor = WorkerSupervisor(settings) if worker else None
        server = _Server(settings, lambda: print(_banner(settings, listener), flush=True))
        # uvicorn stops at these signals, and then raises them again: the process would end before
        # the worker is stopped.
        with handled((signal.SIGINT, signal.SIGTERM), lambda *_: None):
            if supervisor is not None:
                supervisor.start()
            try:
                server.run(sockets=[listener])
            finally:
                if supervisor is not None:
                    supervisor.stop()
    return 0 if server.was_ready else 1


def prepare(settings: Settings) -> None:
    """Create the folders, bring the database to this version's schema, load shipped winners.

    Also installs the kernels that a setting names.
    """
    settings.create_folders()
    loaded = database.prepare(settings)
    _check_keys(settings)
    kernels.install_named(settings)
    _check_packs(settings)
    for path, imported in loaded:
        log.info("shipped winners", file=path.name, added=imported.added, kept=imported.kept)
        if imported.unbelieved:
            log.warning(
                "winners without a trusted signature are not served",
                file=path.name,
                unbelieved=imported.unbelieved,
                keys=imported.keys,
            )


def _check_keys(settings: Settings) -> None:
    """Refuse to start if every request would be refused."""
    if not settings.keys_required:
        return
    with Store.open(settings.database) as store:
        if not store.keys.list(limit=1):
            raise SettingsError(
                f"serving on {settings.host} takes API keys, and this database has no keys: "
                "create one first: gemmsmith keys create NAME --scope admin"
            )


def _check_packs(settings: Settings) -> None:
    """Warn of packs that are not served because they have no trusted signature."""
    identity.signer(settings)  # makes the key, so that this installation's own packs are trusted
    packs = ArtifactStore(settings.packs, trusted=identity.trusted_packs(settings))
    left_out = len(packs.manifests()) - len(packs.manifests(believed=True))
    if left_out > 0:
        log.warning(
            "packs are not served: they have no trusted signature",
            packs=left_out,
            fix="if they were compiled here: gemmsmith signing packs",
        )


class _Server(uvicorn.Server):
    """uvicorn with a call when it answers; it ends event streams when it stops."""

    def __init__(self, settings: Settings, on_ready: Callable[[], None]) -> None:
        self.app = create_app(settings)
        self.was_ready = False
        self._on_ready = on_ready
        super().__init__(
            server_config(
                self.app, settings, timeout_graceful_shutdown=int(settings.stop_timeout_s) + 1
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started and not self.should_exit:
            self.was_ready = True
            # What is loaded by now stays loaded. Collecting it as garbage again and again stopped
            # lookups for 166 ms; now they stop for 12 ms (two busy cores, 2026-11-22).
            gc.freeze()
            self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End event streams at once: uvicorn waits for open connections before anything else."""
        state: Any = getattr(self.app.state, "service", None)
        if state is not None:
            state.stopping.set()
        super().handle_exit(sig, frame)


@contextmanager
def _listening(settings: Settings) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # The protocol is named because asyncio sets TCP_NODELAY only then: without it every answer on
    # a kept-alive connection waits 40 ms for the client's delayed acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with listener:
        try:
            listener.bind((settings.host, settings.port))
        except OSError as error:
            advice = (
                "If another gemmsmith runs there, use it, or choose a free port with --port."
                if error.errno == errno.EADDRINUSE
                else "Choose an address of this machine with --host, such as 127.0.0.1 or 0.0.0.0."
                if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror)
                else "Choose another port with --port."
            )
            raise SettingsError(
                f"cannot listen on {settings.host}:{settings.port}: {error.strerror}. {advice}"
            ) from None
        yield listener


def _banner(settings: Settings, listener: socket.socket) -> str:
    """The pages' address, a lookup, a tuning job, and that job's events.

    The lookup is of a problem with a winner, if there is any; the job is one that the worker's
    device can tune. If keys are required, the lines take one from GEMMSMITH_API_KEY.
    """
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    with Store.open(settings.database) as store:
        model = Catalogue(store.devices, usable_gpu(), settings.default_model).resolve(None, None)
        lookup = _known_problem(store, model.slug if model else None) or FALLBACK
    tuning = _recorded_problem(settings) or lookup
    url = f"http://{shown}:{port}"
    key = ' -H "Authorization: Bearer $GEMMSMITH_API_KEY"' if settings.keys_required else ""
    body = shlex.quote(msgspec.json.encode(tuning).decode())
    return "\n".join(
        [
            f"gemmsmith answers on {url} (pages: {url}/ui, documentation: {url}/docs). Try:",
            "",
            f"  curl -s{key} '{url}{best_url(lookup)}'",
            f"  curl -s{key} -H 'Content-Type: application/json' -d {body} {url}/tune",
            f"  curl -sN{key} {url}/jobs/latest/events",
            "",
        ]
    )


def _known_problem(store: Store, device: str | None) -> Problem | None:
    winners = store.winners(device=device, limit=200)
    winners.sort(key=lambda winner: winner.use.is_default)
    return winners[0].problem if winners else None


def _recorded_problem(settings: Settings) -> Problem | None:
    """A problem that the recorded device holds; None if the worker has a real GPU."""
    if settings.device.startswith("cuda") or (not settings.device and usable_gpu()):
        return None
    for path in sorted(settings.sweeps.glob(f"*{SUFFIX}")):
        try:
            if (problem := first_problem(path)) is not None:
                return problem
        except RecordingCorrupt as error:
            log.warning("recording unusable", error=str(error))
    return None
