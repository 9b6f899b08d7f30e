"""Kernels as they are built, for whoever measures them meanwhile."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Sequence

from gemmsmith.core.kernel import AnyKernel
from tuner.compile import Builder, Built
from tuner.errors import JobAborted

StopSignal = Callable[[], bool]


def in_batches(
    builder: Builder, kernels: Sequence[AnyKernel], should_stop: StopSignal
) -> Generator[list[Built], None, None]:
    """Everything the builder has built since last asked; compilation goes on meanwhile.

    Its results are awaited in a thread of their own, so that kernels are measured while others
    compile, and a signal to stop is noticed. Closing this kills the compilers.
    """
    arrived: queue.SimpleQueue[Built | BaseException | None] = queue.SimpleQueue()

    def pump() -> None:
        try:
            for item in builder.build(kernels):
                arrived.put(item)
            arrived.put(None)
        except BaseException as error:  # noqa: BLE001 - handed to the consumer, which raises it
            arrived.put(error)

    thread = threading.Thread(target=pump, name="gemmsmith-compile", daemon=True)
    thread.start()
    try:
        finished = False
        while not finished:
            batch: list[Built] = []
            first = _next(arrived, should_stop)
            pending: list[Built | BaseException | None] = [first]
            while not arrived.empty():
                pending.append(arrived.get())
            for item in pending:
                if item is None:
                    finished = True
                elif isinstance(item, BaseException):
                    raise item
                else:
                    batch.append(item)
            if batch:
                yield batch
    finally:
        while thread.is_alive():  # again and again: it may be about to start the compilers
            builder.stop()
            thread.join(timeout=0.1)


def _next(
    arrived: queue.SimpleQueue[Built | BaseException | None], should_stop: StopSignal
) -> Built | BaseException | None:
    """The next item; cancellation is noticed within a second even while nvcc is busy."""
    while True:
        try:
            return arrived.get(timeout=1.0)
        except queue.Empty:
            if should_stop():
                raise JobAborted("stopped while compiling; finished kernels are kept") from None
