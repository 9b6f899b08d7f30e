"""Keeps one measuring child alive, and names the candidate that was running when it is lost.

The child is started by `warm`, `start` or the first request, and again after it was lost.
A request is answered by a stream of replies. Silence beyond the time limit, an invalid reply or the
end of the process all raise `Blamed`, which has the index of the entrant that was running, or
`NOBODY`.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Sequence
from contextlib import suppress
from typing import IO

import msgspec

from gemmsmith.core.device import Environment
from tuner import errors
from tuner.errors import DeviceError
from tuner.measure.policy import Policy
from tuner.measure.protocol import (
    NOBODY,
    Dead,
    EntrantOutcome,
    Hello,
    Quit,
    Ready,
    Refused,
    Reply,
    Request,
    Started,
    decode_reply,
    encode,
)
from tuner.trial import Failure, FailureKind

CHILD_COMMAND = (sys.executable, "-P", "-m", "tuner.measure.child")

_QUIT_GRACE_S = 5.0
_STDERR_TAIL = 1500
"""Bytes of the child's last output that a message quotes."""

SETUP_TIMEOUT_S = 240.0
"""Seconds for what comes before a candidate runs: importing torch, operands, reference, cuBLAS."""


class ChildLost(Exception):
    """The child ended, or wrote something that is not a reply."""


class ChildSilent(Exception):
    """The child wrote nothing within its time limit."""


class Child:
    """A running measuring process."""

    def __init__(self, command: Sequence[str]) -> None:
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
        self.greeted = False  # whether it was asked to open the GPU
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


class Blamed(Exception):
    """The child was lost; `index` is the entrant that was running, or NOBODY."""

    def __init__(self, index: int, failure: Failure) -> None:
        super().__init__(failure.message)
        self.index = index
        self.failure = failure


class Supervisor:
    """The child that measures on one GPU."""

    def __init__(
        self,
        ordinal: int,
        command: Sequence[str],
        setup_timeout_s: float,
    ) -> None:
        self._ordinal = ordinal
        self._command = command
        self._setup_timeout_s = setup_timeout_s
        self._child: Child | None = None
        self._starting: Child | None = None
        self._environment: Environment | None = None

    @property
    def environment(self) -> Environment:
        """The environment that the newest child reported. Starts a child if none has started yet.

        Raises:
            DeviceError: the child does not start.
        """
        if self._environment is None:
            self._ready_child()
        assert self._environment is not None  # noqa: S101 - set with a ready child
        return self._environment

    def warm(self) -> None:
        """Start the child, which begins to import torch, and does not use the GPU yet."""
        waiting = self._starting
        if waiting is not None and not waiting.greeted and not waiting.running:
            waiting.kill()
            self._starting = None
        if self._child is None and self._starting is None:
            self._starting = Child(self._command)

    def start(self) -> None:
        """As `warm`, and have the child open the GPU. The first request waits for it."""
        self.warm()
        if self._starting is not None and not self._starting.greeted:
            self._starting.greeted = True
            with suppress(ChildLost):  # raised again by the wait for its reply
                self._starting.send(Hello(ordinal=self._ordinal))

    def close(self) -> None:
        """End the child, if it runs."""
        if self._starting is not None:
            self._starting.kill()
            self._starting = None
        if self._child is not None:
            self._child.quit()
            self._child = None

    def exchange(self, request: Request, policy: Policy) -> Generator[Reply, None, None]:
        """Yield the replies to a request, the closing reply last.

        Closing the generator early kills the child, which would otherwise finish the request.

        Raises:
            Blamed: the child was lost.
            DeviceError: the child refused the request.
        """
        child = self._ready_child()
        blamed = NOBODY
        finished = False
        try:
            child.send(request)
            while not finished:
                # While no candidate runs, the child imports torch or computes the reference.
                limit = self._setup_timeout_s if blamed == NOBODY else policy.candidate_timeout_s
                reply = child.receive(limit)
                match reply:
                    case Started():
                        blamed = reply.index
                        continue
                    case EntrantOutcome():
                        blamed = NOBODY
                    case Dead():
                        raise Blamed(
                            reply.index, Failure(kind=FailureKind.CRASHED, message=reply.message)
                        )
                    case Refused():
                        finished = True
                        raise _refusal(reply)
                    case Ready():
                        raise DeviceError(
                            "the measuring process sent an unexpected reply; try again"
                        )
                    case _:
                        finished = True
                yield reply
        except ChildSilent as silent:
            failure = Failure(kind=FailureKind.HUNG, message=f"{silent}; the process was killed")
            raise Blamed(blamed, failure) from silent
        except ChildLost as lost:
            failure = Failure(kind=FailureKind.CRASHED, message=str(lost))
            raise Blamed(blamed, failure) from lost
        finally:
            if not finished:
                child.kill()
                self._child = None

    def _ready_child(self) -> Child:
        if self._child is not None:
            if self._child.running:
                return self._child
            self._child.kill()
            self._child = None
        self.start()
        child, self._starting = self._starting, None
        assert child is not None  # noqa: S101 - it was started
        try:
            ready = _greeting(child, self._setup_timeout_s)
        except DeviceError:
            child.kill()
            raise
        self._environment = ready.environment
        self._child = child
        return child


def _greeting(child: Child, timeout_s: float) -> Ready:
    try:
        reply = child.receive(timeout_s)
    except (ChildLost, ChildSilent) as error:
        raise DeviceError(
            f"the measuring process does not start: {error}. Run `gemmsmith doctor`"
        ) from error
    if isinstance(reply, Refused):
        raise _refusal(reply)
    if not isinstance(reply, Ready):
        raise DeviceError(
            f"the measuring process started with an unexpected {type(reply).__name__}"
        )
    return reply


def _refusal(refused: Refused) -> DeviceError:
    """The exception that the child named; DeviceError if the name is of no kind of it."""
    error = getattr(errors, refused.error, DeviceError)
    if not (isinstance(error, type) and issubclass(error, DeviceError)):
        error = DeviceError
    return error(refused.message)
