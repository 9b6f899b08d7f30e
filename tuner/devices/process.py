"""The measuring child as its parent sees it: a process that replies, is silent, or ends."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from typing import IO

import msgspec

from tuner.measure.protocol import Quit, Reply, Request, decode_reply, encode

CHILD_COMMAND = (sys.executable, "-P", "-m", "tuner.measure.child")

_QUIT_GRACE_S = 5.0
_STDERR_TAIL = 1500
"""Bytes of the child's last output that a message quotes."""


class ChildLost(Exception):
    """The child ended, or wrote something that is not a reply."""


class ChildSilent(Exception):
    """The child wrote nothing within its time limit."""


class Child:
    """A running measuring process."""

    def __init__(self, command: Sequence[str] = CHILD_COMMAND) -> None:
        # `sys.path` may come from anywhere; the child must import the same packages.
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as self
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # so that an interrupt at the terminal goes to the parent only
        )
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def send(self, request: Request) -> None:
        """Send a request.

        Raises:
            ChildLost: the process has ended.
        """
        assert self._process.stdin is not None  # noqa: S101 - opened as a pipe
        try:
            self._process.stdin.write(encode(request))
            self._process.stdin.flush()
        except OSError as error:
            raise ChildLost(self._describe_end()) from error

    def receive(self, timeout_s: float) -> Reply:
        """Wait for the next reply.

        Raises:
            ChildLost: the process has ended, or wrote something that is not a reply.
            ChildSilent: no reply came within `timeout_s` seconds.
        """
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise ChildSilent(f"no progress within {timeout_s:g} s") from None
        if not line:
            raise ChildLost(self._describe_end())
        try:
            return decode_reply(line)
        except msgspec.DecodeError as error:
            raise ChildLost(f"the measuring process wrote {line[:200]!r}: {error}") from error

    def kill(self) -> None:
        # The driver stops what the process was running on the GPU.
        if self.running:
            self._process.kill()
        self._reap()

    def quit(self) -> None:
        """Ask the process to exit, and kill it if it does not."""
        try:
            self.send(Quit())
            self._process.wait(timeout=_QUIT_GRACE_S)
        except (ChildLost, subprocess.TimeoutExpired):
            self._process.kill()
        self._reap()

    def _reap(self) -> None:
        reap(self._process)
        self._reader.join(timeout=_QUIT_GRACE_S)
        self._stderr.close()

    def _read(self) -> None:
        assert self._process.stdout is not None  # noqa: S101 - opened as a pipe
        try:
            for line in self._process.stdout:
                self._lines.put(line)
        except ValueError:  # the pipe was closed while reading
            pass
        self._lines.put(b"")  # wakes `receive`: the process has ended

    def _describe_end(self) -> str:
        """Describe how the process ended, and quote the end of its stderr."""
        try:
            code = self._process.wait(timeout=_QUIT_GRACE_S)
        except subprocess.TimeoutExpired:
            return "the measuring process closed its output"
        status = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - _STDERR_TAIL))
        output = self._stderr.read().decode(errors="replace").strip()
        return f"the measuring process ended ({status})" + (f": {output}" if output else "")


def reap(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process that is ending, and close the pipes to it."""
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is None:
            continue
        try:
            pipe.close()
        except OSError:  # closing flushes a request that the dead process will not read
            continue
