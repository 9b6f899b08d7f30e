"""The worker's loop: lease a job, tune, settle it; until it is stopped.

A thread renews the lease while the worker has a job. The error that `tune` raises decides how the
job goes on: one that the next attempt would raise again ends it, any other is retried while
attempts last. On SIGTERM the job is handed back between two candidates; at its deadline it ends
there, done if it has a winner. The lease of a worker that is killed expires, and another worker
continues from the recorded trials. If the database cannot be reached the worker waits for it; if a
job's outcome could not be written, its lease expires, too.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from math import inf
from types import FrameType

import structlog

from gemmsmith.errors import InvalidProblem
from tuner.errors import (
    CompilerNotFound,
    DoesNotFit,
    JobAborted,
    LeaseLost,
    NoGpu,
    NoLegalCandidate,
    NotRecorded,
    RecordingCorrupt,
    StoreError,
    TunerError,
)
from tuner.jobs.lease import LeasedJob, StopReason
from tuner.jobs.queue import Queue
from tuner.jobs.workers import REPORT_EVERY_S

log = structlog.get_logger(__name__)

Tune = Callable[[LeasedJob], int | None]
"""Tunes a job's problem; the revision of its winner.

It checks `should_stop` between candidates and then raises `JobAborted`. It may settle the job
itself.
"""

HOPELESS: tuple[type[Exception], ...] = (
    CompilerNotFound,
    DoesNotFit,
    InvalidProblem,
    NoGpu,
    NoLegalCandidate,
    NotRecorded,
    RecordingCorrupt,
)
"""Errors that the next attempt would raise again."""


_SIGNAL_LATENCY_S = 0.1
"""Longest time that an idle worker takes to notice `stop`."""


def unique_owner() -> str:
    return f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"


class Worker:
    """Works on the jobs for some devices, one after the other.

    Args:
        devices: names the worker answers to: its device model's slug, and what the user calls it.
        ttl_s: time without a heartbeat after which other workers may take over; heartbeats come at
            a third of it.
        poll_s: time between two polls of an empty queue.
        on_idle: called after each poll that returned no job.
    """

    def __init__(
        self,
        queue: Queue,
        tune: Tune,
        *,
        devices: Sequence[str],
        owner: str | None = None,
        ttl_s: float = 60.0,
        poll_s: float = 1.0,
        on_idle: Callable[[], None] = lambda: None,
    ) -> None:
        self.owner = owner or unique_owner()
        self._queue = queue
        self._tune = tune
        self._devices = tuple(devices)
        self._ttl_s = ttl_s
        self._poll_s = poll_s
        self._on_idle = on_idle
        self._stopping = False
        self._leased: LeasedJob | None = None
        self._report_at = -inf

    def stop(self) -> None:
        """End the loop: the present job is handed back between two candidates.

        Any thread and any signal handler may call this: it takes no lock that the interrupted
        code might hold.
        """
        self._stopping = True
        leased = self._leased
        if leased is not None:
            leased.ask_to_stop(StopReason.SHUTDOWN)

    def run(self, *, until_idle: bool = False) -> int:
        """Work until `stop`, or with `until_idle` until no job is due; how many jobs it had.

        In the main thread, SIGTERM and SIGINT call `stop` meanwhile.
        """
        worked = 0
        with self._signals(), self._reported():
            while not self._stopping:
                try:
                    self._report()
                    leased = self._queue.lease(self.owner, self._devices, self._ttl_s)
                except StoreError as error:
                    log.warning("store_unavailable", error=str(error))
                    if until_idle:
                        raise
                    self._idle(max(self._poll_s, 1.0))
                    continue
                if leased is not None:
                    worked += 1
                    self._work(leased)
                elif until_idle:
                    break
                else:
                    self._on_idle()
                    self._idle(self._poll_s)
        return worked

    def _report(self) -> None:
        if time.monotonic() >= self._report_at:
            self._queue.workers.report(self.owner, self._devices)
            self._report_at = time.monotonic() + REPORT_EVERY_S

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """Withdraw the report at the end; if the database is unreachable, the report expires."""
        try:
            yield
        finally:
            self._report_at = -inf
            with suppress(StoreError):
                self._queue.workers.leave(self.owner)

    def _idle(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._stopping and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _SIGNAL_LATENCY_S))

    def _work(self, leased: LeasedJob) -> None:
        job = leased.job
        # For every line of the log during the attempt, whichever part of the program writes it.
        about = {"job": job.id, "problem": str(job.problem), "attempt": job.attempt}
        if job.ordered_by is not None:
            about["key"] = job.ordered_by
        with structlog.contextvars.bound_contextvars(**about):
            began = time.monotonic()
            log.info("job_started", effort=job.effort.value)
            self._leased = leased
            if self._stopping:  # `stop` was called between the lease and the line above
                leased.ask_to_stop(StopReason.SHUTDOWN)
            try:
                with _heartbeats(leased):
                    self._attempt(leased)
            except LeaseLost as error:
                log.warning("lease_lost", error=str(error))
            except StoreError as error:
                log.warning("outcome_not_written", error=str(error))
            else:
                log.info("job_settled", seconds=round(time.monotonic() - began, 3))
            finally:
                self._leased = None

    def _attempt(self, leased: LeasedJob) -> None:
        try:
            revision = self._tune(leased)
        except (LeaseLost, StoreError) as error:
            if isinstance(error, LeaseLost) or leased.settled:
                raise
            leased.fail(_message(error), retry=True)
        except JobAborted as error:
            _aborted(leased, _message(error))
        except HOPELESS as error:
            leased.fail(_message(error), retry=False)
        except Exception as error:  # the loop must survive any error of a job
            log.exception("job_crashed")
            leased.fail(_message(error), retry=True)
        except BaseException:  # the process is to end at once
            with suppress(LeaseLost, StoreError):
                leased.release()
            raise
        else:
            if leased.settled:
                return
            if revision is None and leased.should_stop():
                _aborted(leased, "stopped")
            else:
                leased.complete(revision)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(number: int, _frame: FrameType | None) -> None:
            self.stop()
            if number == signal.SIGINT:  # a second Ctrl-C means now: the lease will expire
                signal.signal(number, signal.SIG_DFL)

        before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _aborted(leased: LeasedJob, message: str) -> None:
    match leased.stop_reason:
        case StopReason.CANCELLED:
            leased.cancelled()
        case StopReason.SHUTDOWN:
            leased.release()
        case StopReason.DEADLINE:
            leased.overdue()
        case StopReason.OUTRANKED:
            leased.release("put off: a request goes first")
        case StopReason.LOST:
            raise LeaseLost(message)
        case None:
            leased.fail(message, retry=False)


def _message(error: Exception) -> str:
    # Our own messages are written for people; in others the type says as much as the text.
    if isinstance(error, TunerError | InvalidProblem):
        return str(error)
    return f"{type(error).__name__}: {error}"


@contextmanager
def _heartbeats(leased: LeasedJob) -> Iterator[None]:
    over = threading.Event()

    def beat() -> None:
        while not over.wait(leased.ttl_s / 3):
            try:
                leased.heartbeat()
            except LeaseLost:
                return  # `should_stop` says so now
            except StoreError as error:
                log.warning("heartbeat_failed", job=leased.job.id, error=str(error))

    thread = threading.Thread(target=beat, name=f"heartbeat-{leased.job.id}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
