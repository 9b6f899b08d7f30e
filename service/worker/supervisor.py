"""Keeps one worker process running beside the service.

A worker that dies is started again after a pause that doubles up to a minute, and is short again
once a worker has stayed up for long. The worker's standard input is one end of a socket. If this
process is killed, the socket closes and the worker stops too, so no orphan is left on the GPU. The
other way round the worker says every second that it runs: one that was stopped (SIGSTOP), or whose
interpreter hangs, keeps its locks, so after `SILENT_S` it is killed and another one started.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import structlog

from service.settings import Settings

log = structlog.get_logger("gemmsmith.serve")

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
HEALTHY_AFTER_S = 60.0
"""A worker that lived this long did not die of starting."""

BEAT_S = 1.0
"""How often the worker says that it runs."""

SILENT_S = 20.0
"""Silence after which a worker is killed. Less than writers wait for each other
(`tuner.store.database.BUSY_TIMEOUT_S`), so that whoever waits for its transaction still writes; far
more than a busy machine keeps a thread from running."""

BEGINS_WITHIN_S = 120.0
"""Silence of a worker that has yet to be heard: it imports its libraries, maybe over a network."""


class WorkerSupervisor:
    """Starts the worker, restarts it, stops it. The other arguments are there for tests."""

    def __init__(
        self,
        settings: Settings,
        command: Sequence[str] = (sys.executable, "-P", "-m", "service.worker.process"),
        first_pause_s: float = FIRST_PAUSE_S,
        silent_s: float = SILENT_S,
    ) -> None:
        self._settings = settings
        self._command = list(command)
        self._first_pause_s = first_pause_s
        self._silent_s = silent_s
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self.starts = 0

    @property
    def pid(self) -> int | None:
        """The worker's process id while one runs."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def start(self) -> None:
        """Start the worker and watch it from a thread."""
        self._thread.start()

    def stop(self) -> None:
        """SIGTERM to the worker, wait for it to hand back its job; kill it if it does not."""
        self._stopping.set()
        with self._lock:
            process = self._process
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(self._settings.stop_timeout_s)
            except subprocess.TimeoutExpired:
                log.warning("worker did not stop in time; killing it", pid=process.pid)
                process.kill()
                process.wait()
        self._thread.join()

    def _run(self) -> None:
        pause = self._first_pause_s
        while not self._stopping.is_set():
            began = time.monotonic()
            status = self._run_once()
            if self._stopping.is_set():
                return
            if time.monotonic() - began >= HEALTHY_AFTER_S:
                pause = self._first_pause_s
            log.warning("worker ended; starting another", status=status, pause_s=pause)
            self._stopping.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _run_once(self) -> int:
        with self._lock:
            if self._stopping.is_set():
                return 0
            ours, theirs = socket.socketpair()
            # A session of its own: Ctrl-C reaches the service alone, which then stops the worker.
            with theirs:
                self._process = process = subprocess.Popen(
                    self._command,
                    stdin=theirs.fileno(),
                    env={**os.environ, **self._settings.environment(), "GEMMSMITH_SUPERVISED": "1"},
                    start_new_session=True,
                )
            self.starts += 1
        log.info("worker started", pid=process.pid)
        with ours:
            if not self._listen(ours, process):
                log.error("worker stopped answering; killing it", pid=process.pid)
                process.kill()
            return process.wait()

    def _listen(self, line: socket.socket, process: subprocess.Popen[bytes]) -> bool:
        """Return when the worker ends, True, or has been silent for too long, False."""
        line.settimeout(BEAT_S)
        silent_s, limit_s = 0.0, BEGINS_WITHIN_S
        while process.poll() is None and silent_s < limit_s:
            try:
                if not line.recv(4096):
                    return True
            except TimeoutError:
                # Counted, not timed: where both processes were frozen, neither is to blame.
                silent_s += BEAT_S
            except ConnectionResetError:
                return True
            else:
                silent_s, limit_s = 0.0, self._silent_s
        return process.poll() is not None
