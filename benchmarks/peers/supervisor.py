"""Keeps a measuring process running.

If the process dies, or is silent for longer than it announced, the peer that it worked on is left
out for this problem, and a new process measures the others.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import msgspec

from benchmarks.peers.records import BASELINE, Busy, Done, Entry, Message, Ready, Request, Row
from tuner.devices.supervisor import reap

START_LIMIT_S = 180.0
"""Time to import torch and create a CUDA context, on a machine that has just booted."""
_STDERR_TAIL = 300


class Lost(Exception):
    """The process ended, or was silent for too long."""


class Supervisor:
    """A context manager of the process. `ready` has the GPU of the last process."""

    def __init__(self, command: Sequence[str], start_limit_s: float = START_LIMIT_S) -> None:
        self._command = list(command)
        self._start_limit_s = start_limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as self
        self._caches = tempfile.TemporaryDirectory(prefix="peers-", ignore_cleanup_errors=True)
        self._decoder = msgspec.json.Decoder(Message)
        self.ready: Ready | None = None

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._stderr.close()
        self._caches.cleanup()

    def measure(self, request: Request) -> Row:
        """Measure a problem; every peer of the request has an entry, unless the problem failed."""
        lost: dict[str, Entry] = {}
        while True:
            peers = tuple(peer for peer in request.peers if peer not in lost)
            attempt = msgspec.structs.replace(request, peers=peers)
            busy_with = ""
            try:
                self._start()
                self._send(attempt)
                limit = self._start_limit_s
                while True:
                    message = self._receive(limit)
                    if isinstance(message, Done):
                        row = message.row
                        return msgspec.structs.replace(row, entries={**row.entries, **lost})
                    if isinstance(message, Busy):
                        busy_with, limit = message.peer, message.limit_s
            except Lost as error:
                self.close()
                if busy_with in ("", BASELINE):
                    return Row(problem=request.problem, entries=lost, failure=str(error))
                lost[busy_with] = Entry(reason=str(error))

    def close(self) -> None:
        """Kill the process."""
        if self._process is None:
            return
        self._process.kill()
        reap(self._process)
        self._process = None

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        caches = Path(self._caches.name)
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            start_new_session=True,
            env={
                **os.environ,
                # The caches are new for a run, but a second process need not tune again.
                "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
                "TRITON_CACHE_DIR": str(caches / "triton"),
                "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
            },
        )
        self._lines = queue.SimpleQueue()
        threading.Thread(
            target=_read, args=(self._process.stdout, self._lines), daemon=True
        ).start()
        message = self._receive(self._start_limit_s)
        if not isinstance(message, Ready):
            raise Lost(f"its process began with {type(message).__name__}")
        self.ready = message

    def _send(self, request: Request) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(request) + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise Lost(self._ending()) from None

    def _receive(self, limit_s: float) -> Message:
        try:
            line = self._lines.get(timeout=limit_s)
        except queue.Empty:
            raise Lost(f"gave no sign of life for {limit_s:g} s and was killed") from None
        if not line:
            raise Lost(self._ending())
        message: Message = self._decoder.decode(line)
        return message

    def _ending(self) -> str:
        assert self._process is not None
        code = self._process.wait()
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - _STDERR_TAIL))
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        last = f": {lines[-1]}" if lines else ""
        return f"its process ended with status {code}{last}"


def _read(source: IO[bytes], lines: queue.SimpleQueue[bytes]) -> None:
    try:
        for line in source:
            lines.put(line)
    except ValueError:  # closed while reading
        pass
    lines.put(b"")
