"""The measuring child as its parent sees it: a process that answers, falls silent, or ends."""

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


class ChildLost(Exception):
    """The child ended, or said something that is not the protocol."""


class ChildSilent(Exception):
    """The child said nothing for as long as it was given."""


class Child:
    """A running measuring process."""

    def __init__(self, command: Sequence[str] = CHILD_COMMAND) -> None:
        # The child must find the same packages however this process came to find them.
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as self
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # an interrupt at the terminal is the parent's to handle
        )
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def send(self, request: Request) -> None:
        """Send a request.

        Raises:
            ChildLost: the process has ended.
        """
        assert self._process.stdin is not None  # noqa: S101 - it was asked for
        try:
            self._process.stdin.write(encode(request))
            self._process.stdin.flush()
        except OSError as error:
            raise ChildLost(self._obituary()) from error

    def receive(self, timeout_s: float) -> Reply:
        """The next reply.

        Raises:
            ChildLost, ChildSilent
        """
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise ChildSilent(f"no progress within {timeout_s:g} s") from None
        if not line:
            raise ChildLost(self._obituary())
        try:
            return decode_reply(line)
        except msgspec.DecodeError as error:
            raise ChildLost(f"the measuring process said {line[:200]!r}: {error}") from error

    def kill(self) -> None:
        """End the process at once; the driver ends what it was running on the GPU."""
        if self.running:
            self._process.kill()
        self._reap()

    def quit(self) -> None:
        """Ask the process to exit, and make sure it does."""
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
        assert self._process.stdout is not None  # noqa: S101 - it was asked for
        try:
            for line in self._process.stdout:
                self._lines.put(line)
        except ValueError:  # closed while reading
            pass
        self._lines.put(b"")

    def _obituary(self) -> str:
        """How the process ended, with the last of what it wrote to stderr."""
        try:
            code = self._process.wait(timeout=_QUIT_GRACE_S)
        except subprocess.TimeoutExpired:
            return "the measuring process closed its output"
        how = f"exit status {code}"
        if code < 0:
            how = f"killed by {signal.Signals(-code).name}"
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - _STDERR_TAIL))
        said = self._stderr.read().decode(errors="replace").strip()
        return f"the measuring process ended ({how})" + (f": {said}" if said else "")


def reap(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process that is ending, and close the pipes to it."""
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is None:
            continue
        try:
            pipe.close()
        except OSError:  # unsent bytes of a request nobody will read
            continue
