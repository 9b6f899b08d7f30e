"""Keeps one worker process running beside the service.

A worker that dies is started again after a pause that doubles up to a minute, and is short again
once a worker has stayed up for long. The worker reads the other end of a pipe: if this process is
killed, the pipe closes and the worker stops too, so no orphan is left on the GPU.
"""

from __future__ import annotations

import os
import signal
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


class WorkerSupervisor:
    """Starts the worker, restarts it, stops it. `command` is replaceable for tests."""

    def __init__(
        self,
        settings: Settings,
        command: Sequence[str] = (sys.executable, "-m", "service.worker.process"),
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        self._settings = settings
        self._command = list(command)
        self._first_pause_s = first_pause_s
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
            # A session of its own: Ctrl-C reaches the service alone, which then stops the worker.
            self._process = process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                env={**os.environ, **self._settings.environment(), "GEMMSMITH_SUPERVISED": "1"},
                start_new_session=True,
            )
            self.starts += 1
        log.info("worker started", pid=process.pid)
        try:
            return process.wait()
        finally:
            if process.stdin is not None:
                process.stdin.close()
