"""Keeps one worker process running beside the service.

A worker that dies is started again after a pause. The pause doubles up to a minute, and is short
again after a worker has run for `HEALTHY_AFTER_S`. The worker's standard input is one end of a
socket. If this process is killed, the socket closes and the worker stops too, so that no orphan is
left on the GPU. The worker sends a byte every second: one that was stopped (SIGSTOP), or whose
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

SUPERVISED = "GEMMSMITH_SUPERVISED"
"""Set for a worker whose standard input is the supervisor's socket."""

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
HEALTHY_AFTER_S = 60.0
"""A worker that ran this long did not fail at its start."""

BEAT_S = 1.0
"""How often the worker sends a byte."""

SILENT_S = 20.0
"""Silence after which a worker is killed. It is less than writers wait for each other
(`tuner.store.database.BUSY_TIMEOUT_S`), so that a writer that waits for the worker's transaction
does not fail; it is far more than a busy machine keeps a thread from running."""

BEGINS_WITHIN_S = 120.0
"""The same before a worker's first byte: it imports its libraries, maybe over a network."""


class WorkerSupervisor:
    """Starts, restarts and stops the worker. Arguments other than `settings` are for tests."""

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
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop the worker with SIGTERM, so that it hands back its job; kill it if it does not."""
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
        with self._lock:  # so that `stop` does not miss a process that is being started
            if self._stopping.is_set():
                return 0
            ours, theirs = socket.socketpair()
            # A session of its own, so that Ctrl-C reaches the service only, which stops the worker.
            with theirs:
                self._process = process = subprocess.Popen(
                    self._command,
                    stdin=theirs.fileno(),
                    env={**os.environ, **self._settings.environment(), SUPERVISED: "1"},
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
        """Return True when the worker has ended, and False if it was silent for too long."""
        line.settimeout(BEAT_S)
        silent_s, limit_s = 0.0, BEGINS_WITHIN_S
        while process.poll() is None and silent_s < limit_s:
            try:
                if not line.recv(4096):
                    return True
            except TimeoutError:
                # Timeouts are counted instead of reading a clock: if the whole machine was frozen
                # (suspended), the worker is not to blame for the silence.
                silent_s += BEAT_S
            except ConnectionResetError:
                return True
            else:
                silent_s, limit_s = 0.0, self._silent_s
        return process.poll() is not None
