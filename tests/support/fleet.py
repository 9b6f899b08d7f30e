"""A service and its workers as real processes that can be killed and started again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
import psutil

from gemmsmith.core.tuning import JobState
from service.worker.supervisor import SILENT_S
from tests.support.processes import until
from tests.support.shipped import DEVICE, SWEEPS
from tuner.jobs import Queue
from tuner.store import Store

WORKER = (sys.executable, "-m", "tests.support.brisk_worker")
SERVE = f"""
import os, sys
from functools import partial
from service.cli import serve
from service.settings import Settings
from tests.support import clocks
clocks.install()
serve.WorkerSupervisor = partial(
    serve.WorkerSupervisor,
    command={WORKER!r},
    first_pause_s=0.2,
    silent_s=float(os.environ.get("GEMMSMITH_TEST_SILENT_S", {SILENT_S})),
)
sys.exit(serve.serve(Settings.load(), worker="worker" in sys.argv))
"""


class Fleet:
    """Processes with the same database and settings. A context manager that kills them at its end.

    Attributes:
        url: the service's URL, which is kept when the service is started again.
        client: a shared client of the service, because a new client costs more than a request.
    """

    def __init__(self, url: str, folder: Path, **environ: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.client = httpx.Client(base_url=self.url, timeout=40)
        self.packs = folder / "packs"
        self.service: subprocess.Popen[bytes] | None = None
        self.workers: list[subprocess.Popen[bytes]] = []
        self._database = url
        self._log = folder / "fleet.log"
        self._environ = {
            **os.environ,
            "GEMMSMITH_DATABASE": url,
            "GEMMSMITH_PACKS": str(self.packs),
            "GEMMSMITH_SWEEPS": str(SWEEPS),
            "GEMMSMITH_WINNERS": str(folder / "none"),
            "GEMMSMITH_DEVICE": DEVICE,
            "GEMMSMITH_PORT": str(port),
            "GEMMSMITH_EVENTS_POLL_S": "0.05",
            **environ,
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill(self.processes())
        self.client.close()
        if kind is not None:
            sys.stdout.write(self.log()[-8000:])

    def serve(self, *, worker: bool = False) -> None:
        """Start the service, with or without a worker under its control. Does not wait for it."""
        arguments = ["worker"] if worker else []
        self.service = self._start([sys.executable, "-c", SERVE, *arguments])

    def work(self, count: int = 1, **environ: str) -> None:
        """Start workers that are not under the service's control."""
        self.workers += [self._start(WORKER, **environ) for _ in range(count)]

    def wait_until_up(self) -> None:
        """Return when the service answers."""
        until(self._answers, "the service does not answer")

    def processes(self) -> list[psutil.Process]:
        """All running processes: first the service, then its worker."""
        members: list[psutil.Process] = []
        for process in filter(None, [self.service, *self.workers]):
            if process.poll() is None:
                parent = psutil.Process(process.pid)
                members += [parent, *_workers_below(parent)]
        return members

    def kill(self, victims: Iterable[psutil.Process]) -> None:
        """SIGKILL these processes at the same time, and wait for their end."""
        dying = list(victims)
        for process in dying:
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        for process in filter(None, [self.service, *self.workers]):
            if process.pid in {victim.pid for victim in dying}:
                process.wait()
        self.workers = [worker for worker in self.workers if worker.poll() is None]
        psutil.wait_procs(dying, timeout=30)

    def end(self, patience_s: float = 60.0) -> int:
        """Send SIGTERM to the service, which ends its worker. Returns the exit status."""
        assert self.service is not None
        self.service.terminate()
        return self.service.wait(patience_s)

    def wait_until_idle(self, patience_s: float = 120.0) -> None:
        """Wait until no job is waiting or running."""
        deadline = time.monotonic() + patience_s
        with Store.open(self._database) as store:
            queue = Queue(store)
            while left := _unfinished(queue):
                assert time.monotonic() < deadline, f"{left} jobs are not finished"
                time.sleep(0.1)

    def wait_until_ready(self, workers: int) -> None:
        """Wait until this number of workers, counted from the beginning, have become ready."""
        until(lambda: self.log().count("worker ready") >= workers, "not enough workers")

    def log(self) -> str:
        """The output of all processes so far."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def _start(self, command: Iterable[str], **environ: str) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                list(command),
                env={**self._environ, **environ},
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    def _answers(self) -> bool:
        assert self.service is not None
        assert self.service.poll() is None, self.log()[-4000:]
        try:
            return self.client.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False


def _workers_below(service: psutil.Process) -> list[psutil.Process]:
    try:
        return [p for p in service.children() if "tests.support.brisk_worker" in p.cmdline()]
    except psutil.NoSuchProcess:
        return []


def _unfinished(queue: Queue) -> int:
    counts = queue.counts()
    return counts[JobState.WAITING] + counts[JobState.RUNNING]
