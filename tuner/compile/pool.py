"""Builds kernel packs, several units in parallel.

`Builder.build` yields one `Built` per kernel: at once for kernels that are in the store already,
for the others as their units finish. A kernel that does not compile gives a `Built` with a failure,
and the other kernels of its unit are compiled again without it. Compilation continues in the
background while the caller handles a result. It ends, and the compilers are killed, when the
generator is closed, at `Builder.stop`, or when the process exits. Only a fault of the machine (full
disk, broken compiler) raises.
"""

from __future__ import annotations

import atexit
import queue
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import assert_never

from gemmsmith.core.kernel import AnyKernel
from tuner.backends import compiles
from tuner.compile import nvcc, plan
from tuner.compile.artifacts import ArtifactStore
from tuner.compile.manifest import Pack
from tuner.compile.nvcc import Compilation
from tuner.compile.toolchain import Toolchain
from tuner.errors import JobAborted, TunerError
from tuner.trial import Failure, FailureKind

TIME_LIMIT_S = 900.0
"""Wall time of one nvcc run. A unit of 16 takes about 3 minutes on a busy slow core."""
_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """The result for one kernel: its `pack`, or the `failure` that prevented one.

    Attributes:
        cached: the pack was in the store already.
        seconds: wall time of the nvcc run that gave this result, for the whole unit.
    """

    kernel: AnyKernel
    pack: Pack | None = None
    failure: Failure | None = None
    cached: bool = False
    seconds: float = 0.0


class Builder:
    """Builds kernels into a store with one toolchain.

    Args:
        workers: units to compile at once; by default `GEMMSMITH_COMPILE_JOBS`, or as many as cores
            and memory allow.
        time_limit_s: wall time after which an nvcc run is killed.
    """

    def __init__(
        self,
        store: ArtifactStore,
        toolchain: Toolchain,
        workers: int | None = None,
        time_limit_s: float = TIME_LIMIT_S,
    ) -> None:
        self.store = store
        self.toolchain = toolchain
        self._workers = workers
        self._time_limit_s = time_limit_s
        self._run: _CompileRun | None = None

    def has(self, kernel: AnyKernel) -> bool:
        return compiles(kernel) and self._find(kernel) is not None

    def _find(self, kernel: AnyKernel) -> Pack | None:
        return self.store.find(kernel, toolchain=self.toolchain.targeting(kernel.arch).digest)

    def build(self, kernels: Sequence[AnyKernel]) -> Iterator[Built]:
        """Build the kernels, and yield exactly one result for each, as soon as it is known.

        Raises:
            DiskFull: no space for the compiler or for a pack; finished packs are kept.
            CompileFailed: the compiler does not work on this machine at all.
            JobAborted: `stop` was called meanwhile; finished packs are kept.
        """
        missing = []
        for kernel in {kernel.name: kernel for kernel in kernels}.values():
            if not compiles(kernel):
                reason = f"kernels of {kernel.source} cannot be compiled here for {kernel.arch}"
                yield Built(
                    kernel=kernel, failure=Failure(kind=FailureKind.COMPILE, message=reason)
                )
            elif (pack := self._find(kernel)) is not None:
                yield Built(kernel=kernel, pack=pack, cached=True)
            else:
                missing.append(kernel)
        if not missing:
            return
        parallel = plan.workers(self._workers)
        self._run = run = _CompileRun(self.store, self.toolchain, parallel, self._time_limit_s)
        run.start(plan.units(missing, parallel))
        try:
            yield from run.results(len(missing))
        finally:
            run.stop()

    def stop(self) -> None:
        """Kill the compilers of a `build` in another thread, if one is running.

        The builder can build again afterwards.
        """
        if self._run is not None:
            self._run.stop()


class _CompileRun:
    """One build: a thread that keeps `parallel` compilers running."""

    def __init__(
        self, store: ArtifactStore, toolchain: Toolchain, parallel: int, time_limit_s: float
    ) -> None:
        self._store = store
        self._toolchain = toolchain
        self._parallel = parallel
        self._time_limit_s = time_limit_s
        self._waiting: deque[Sequence[AnyKernel]] = deque()
        self._running: list[Compilation] = []
        self._results: queue.SimpleQueue[Built | BaseException] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._supervise, name="compile pool", daemon=True)

    def start(self, units: list[list[AnyKernel]]) -> None:
        self._waiting.extend(units)
        atexit.register(self.stop)
        self._thread.start()

    def results(self, count: int) -> Iterator[Built]:
        for _ in range(count):
            result = self._results.get()
            match result:
                case Built():
                    yield result
                case BaseException():
                    raise result
                case _:
                    assert_never(result)

    def stop(self) -> None:
        """Kill the compilers that still run, and wait for the thread to end."""
        self._stopping.set()
        self._thread.join()
        atexit.unregister(self.stop)

    def _supervise(self) -> None:
        try:
            while (self._waiting or self._running) and not self._stopping.is_set():
                while self._waiting and len(self._running) < self._parallel:
                    unit = self._waiting.popleft()
                    self._running.append(Compilation.start(unit, self._toolchain))
                self._stopping.wait(_POLL_S)
                for compilation in list(self._running):
                    self._attend(compilation)
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            self._results.put(error)
        finally:
            for compilation in self._running:
                compilation.stop()
                compilation.discard()
            if self._stopping.is_set():
                self._results.put(JobAborted("compilation was stopped; finished packs are kept"))

    def _attend(self, compilation: Compilation) -> None:
        """If a compilation has ended or timed out, deliver the results or retry its kernels."""
        returncode = compilation.process.poll()
        timed_out = returncode is None and compilation.seconds > self._time_limit_s
        if returncode is None and not timed_out:
            return
        self._running.remove(compilation)
        try:
            compilation.stop()
            if returncode == 0:
                built = self._published(compilation)
            elif timed_out:
                reason = f"nvcc did not finish within {self._time_limit_s:.0f} s"
                built = self._retry(compilation, [], reason)
            else:
                built = self._diagnosed(compilation, compilation.process.returncode)
        finally:
            compilation.discard()
        for result in built:
            self._results.put(result)

    def _published(self, compilation: Compilation) -> list[Built]:
        pack = self._store.publish(compilation.output, compilation.kernels, compilation.toolchain)
        return [
            Built(kernel=kernel, pack=pack, seconds=compilation.seconds)
            for kernel in compilation.kernels
        ]

    def _diagnosed(self, compilation: Compilation, returncode: int) -> list[Built]:
        log = compilation.log()
        fault: TunerError | None = nvcc.environment_fault(log)
        if fault is not None:
            raise fault
        if nvcc.out_of_memory(returncode, log):
            # Other units may have taken the memory: run fewer at once. A kernel that ran out of
            # memory alone has failed.
            alone = self._parallel == 1
            self._parallel = max(1, self._parallel // 2)
            if len(compilation.kernels) == 1 and not alone:
                self._waiting.append(compilation.kernels)
                return []
            return self._retry(compilation, [], "nvcc ran out of memory")
        return self._retry(compilation, nvcc.suspects(compilation.kernels, log), nvcc.summary(log))

    def _retry(
        self, compilation: Compilation, suspects: list[AnyKernel], reason: str
    ) -> list[Built]:
        """Fail a unit of one kernel; divide a larger unit, and compile its parts again."""
        # Suspects get a unit each and are not failed at once: a message about one kernel may name
        # another that shares a type with it. Without suspects the unit is halved.
        kernels = compilation.kernels
        if len(kernels) == 1:
            failure = Failure(kind=FailureKind.COMPILE, message=reason)
            return [Built(kernel=kernels[0], failure=failure, seconds=compilation.seconds)]
        if suspects and len(suspects) < len(kernels):
            others = [kernel for kernel in kernels if kernel not in suspects]
            pieces = [others, *([kernel] for kernel in suspects)]
        else:
            middle = len(kernels) // 2
            pieces = [list(kernels[:middle]), list(kernels[middle:])]
        self._waiting.extendleft(reversed(pieces))
        return []
