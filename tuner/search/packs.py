"""The kernels of one tuning run: built before they are needed, whole when they are used.

A pack may be damaged or removed after it was built (by a disk, a clean-up or a person). It is
checked again before a candidate is measured, and then built again; a failure that comes from a
damaged pack says nothing about the candidate.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Sequence

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.kernel import AnyKernel
from tuner.compile import Builder, Built
from tuner.devices.base import Contender
from tuner.errors import JobAborted

StopSignal = Callable[[], bool]


class RunPacks:
    """What was built so far. `builder` is None if the device needs no packs."""

    def __init__(self, builder: Builder | None) -> None:
        self._builder = builder
        self._built: dict[str, Built] = {}

    def __len__(self) -> int:
        return len(self._built)

    def add(self, built: Built) -> None:
        self._built[built.kernel.name] = built

    def hash(self, candidate: Candidate) -> str | None:
        built = self._built.get(candidate.kernel.name)
        return built.pack.hash if built is not None and built.pack is not None else None

    def is_damaged(self, candidate: Candidate) -> bool:
        """Whether the candidate's pack was built, and is now damaged or gone."""
        pack_hash = self.hash(candidate)
        if pack_hash is None or self._builder is None:
            return False
        return self._builder.store.get(pack_hash, afresh=True) is None

    def contender(self, candidate: Candidate) -> Contender:
        """The candidate with its pack, which is built first if it is missing or damaged.

        Not while the builder is at work.
        """
        if self._builder is None:
            return Contender(candidate=candidate)
        if candidate.kernel.name not in self._built or self.is_damaged(candidate):
            self.add(next(iter(self._builder.build([candidate.kernel]))))
        return self.as_built(candidate)

    def as_built(self, candidate: Candidate) -> Contender:
        """The candidate with the pack that was built for it, unchecked."""
        built = self._built.get(candidate.kernel.name)
        pack = built.pack if built is not None else None
        return Contender(candidate=candidate, pack=pack.path if pack else None)


def in_batches(
    builder: Builder, kernels: Sequence[AnyKernel], should_stop: StopSignal
) -> Generator[list[Built], None, None]:
    """Batches of the kernels built since the batch before; compilation goes on meanwhile.

    A thread of its own waits for the builder's results, so that kernels are measured while others
    compile, and a signal to stop is noticed. Closing the generator kills the compilers.
    """
    results: queue.SimpleQueue[Built | BaseException | None] = queue.SimpleQueue()

    def pump() -> None:
        try:
            for built in builder.build(kernels):
                results.put(built)
            results.put(None)
        except BaseException as error:  # noqa: BLE001 - handed to the consumer, which raises it
            results.put(error)

    thread = threading.Thread(target=pump, name="gemmsmith-compile", daemon=True)
    thread.start()
    try:
        finished = False
        while not finished:
            batch: list[Built] = []
            pending = [_next(results, should_stop)]
            while not results.empty():
                pending.append(results.get())
            for result in pending:
                if result is None:
                    finished = True
                elif isinstance(result, BaseException):
                    raise result
                else:
                    batch.append(result)
            if batch:
                yield batch
    finally:
        while thread.is_alive():  # again and again: it may be about to start the compilers
            builder.stop()
            thread.join(timeout=0.1)


def _next(
    results: queue.SimpleQueue[Built | BaseException | None], should_stop: StopSignal
) -> Built | BaseException | None:
    """The next result; cancellation is noticed within a second even while nvcc is busy."""
    while True:
        try:
            return results.get(timeout=1.0)
        except queue.Empty:
            if should_stop():
                raise JobAborted("stopped while compiling; finished kernels are kept") from None
