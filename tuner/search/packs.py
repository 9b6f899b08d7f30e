"""The kernels of one tuning run: built before they are needed, whole when they are used.

A pack may be damaged or removed after it was built (by a disk, a clean-up or a person). It is
checked again before a candidate is measured, and then built again; a failure that comes from a
damaged pack says nothing about the candidate.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import closing

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

    def missing(self, kernels: Sequence[AnyKernel]) -> list[AnyKernel]:
        """Those of the kernels that were not built for this run, each once."""
        return [kernel for kernel in dict.fromkeys(kernels) if kernel.name not in self._built]

    def built(self, kernels: Sequence[AnyKernel]) -> list[Built]:
        """What came of those of the kernels that were built for this run."""
        names = dict.fromkeys(kernel.name for kernel in kernels)
        return [self._built[name] for name in names if name in self._built]

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
        """The candidate with its pack, which is built first if it is missing or damaged."""
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


class Compiling:
    """Kernels that are built in the background.

    A thread of its own waits for the builder's results, so that kernels are measured while others
    compile, and a signal to stop is noticed. `close` kills the compilers if they still run.
    """

    def __init__(self, builder: Builder, kernels: Sequence[AnyKernel]) -> None:
        self._builder = builder
        self._kernels = kernels
        self._results: queue.SimpleQueue[Built | BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._pump, name="gemmsmith-compile", daemon=True)
        self._thread.start()
        self.finished = False

    def _pump(self) -> None:
        try:
            for built in self._builder.build(self._kernels):
                self._results.put(built)
            self._results.put(None)
        except BaseException as error:  # noqa: BLE001 - raised again by `ready`
            self._results.put(error)

    def ready(self, should_stop: StopSignal, *, wait: bool = True) -> list[Built]:
        """Kernels that were built since the last call; without `wait` there may be none yet.

        Raises:
            JobAborted: `should_stop` was true while it waited.
            TunerError: the compiler does not work on this machine.
        """
        batch: list[Built] = []
        while not self.finished and ((wait and not batch) or not self._results.empty()):
            result = _next(self._results, should_stop)
            if result is None:
                self.finished = True
                self._thread.join()
            elif isinstance(result, BaseException):
                raise result
            else:
                batch.append(result)
        return batch

    def close(self) -> None:
        while self._thread.is_alive():  # again and again: it may be about to start the compilers
            self._builder.stop()
            self._thread.join(timeout=0.1)


def in_batches(
    builder: Builder, kernels: Sequence[AnyKernel], should_stop: StopSignal
) -> Generator[list[Built], None, None]:
    """Batches of the kernels built since the batch before; compilation goes on meanwhile.

    Closing the generator kills the compilers.
    """
    with closing(Compiling(builder, kernels)) as compiling:
        while batch := compiling.ready(should_stop):
            yield batch


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
