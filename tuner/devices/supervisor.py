"""Keeps one measuring child alive, and names the candidate that was running when it is lost.

The child is started by `start` or by the first request, and again after it was lost. A request is
answered by a stream of replies. Silence beyond the time limit, an invalid reply or the end of the
process all raise `Blamed`, which has the index of the entrant that was running, or `NOBODY`.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import suppress

from gemmsmith.core.device import Environment
from tuner import errors
from tuner.devices.process import CHILD_COMMAND, Child, ChildLost, ChildSilent
from tuner.errors import DeviceError
from tuner.measure.policy import Policy
from tuner.measure.protocol import (
    NOBODY,
    Dead,
    EntrantOutcome,
    Hello,
    Ready,
    Refused,
    Reply,
    Request,
    Started,
)
from tuner.trial import Failure, FailureKind

SETUP_TIMEOUT_S = 240.0
"""Seconds for what comes before a candidate runs: importing torch, operands, reference, cuBLAS."""


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
        command: Sequence[str] = CHILD_COMMAND,
        setup_timeout_s: float = SETUP_TIMEOUT_S,
    ) -> None:
        self._ordinal = ordinal
        self._command = tuple(command)
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

    def start(self) -> None:
        """Start the child, which begins to import torch. The first request waits for the rest."""
        if self._child is None and self._starting is None:
            self._starting = Child(self._command)
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
