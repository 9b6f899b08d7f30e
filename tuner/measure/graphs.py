"""CUDA streams, events and graphs through cuda-python's driver API.

Every call's status is checked; a failure is a `CudaError` with the driver's name for it. The
calling thread must have a current context (torch makes one).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from cuda.bindings import driver

from tuner.errors import DeviceError

NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: no implicit order with the legacy default stream


class CudaError(DeviceError):
    """A CUDA driver call failed. `name` is the driver's, such as CUDA_ERROR_ILLEGAL_ADDRESS."""

    def __init__(self, call: str, name: str) -> None:
        super().__init__(f"{call}: {name}")
        self.name = name


def checked(call: str, result: tuple[Any, ...]) -> Any:
    """The value of a driver call.

    Raises:
        CudaError: its status is not success.
    """
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        raise CudaError(call, driver.CUresult(status).name)
    return values[0] if values else None


class Stream:
    """A CUDA stream of our own, which torch uses too (`with stream.torch():`)."""

    def __init__(self) -> None:
        self.handle = checked("cuStreamCreate", driver.cuStreamCreate(NON_BLOCKING))
        self.pointer = int(self.handle)
        self._external = torch.cuda.ExternalStream(self.pointer)  # type: ignore[no-untyped-call]

    def torch(self) -> torch.cuda.StreamContext:
        return torch.cuda.stream(self._external)


class Event:
    """A timing event. Reused over and over: creating one costs more than recording it."""

    __slots__ = ("handle",)

    def __init__(self) -> None:
        self.handle = checked("cuEventCreate", driver.cuEventCreate(0))

    def record(self, stream: Stream) -> None:
        checked("cuEventRecord", driver.cuEventRecord(self.handle, stream.handle))

    def wait(self) -> None:
        checked("cuEventSynchronize", driver.cuEventSynchronize(self.handle))

    def microseconds_since(self, start: Event) -> float:
        """Time between two events that have happened."""
        milliseconds = checked(
            "cuEventElapsedTime", driver.cuEventElapsedTime(start.handle, self.handle)
        )
        return float(milliseconds) * 1000


def rough_us(stream: Stream, count: int, launch: Callable[[int], object]) -> float:
    """Mean time of `count` launches, host overhead included."""
    before, after = Event(), Event()
    before.record(stream)
    for i in range(count):
        launch(i)
    after.record(stream)
    after.wait()
    return after.microseconds_since(before) / count


class Replay(Protocol):
    """A captured graph of `launches` launches that can be enqueued again and again."""

    launches: int

    def enqueue(self) -> None:
        """Enqueue one replay on the stream it was captured for."""

    def close(self) -> None:
        """Free the graph; it must not be running."""


class KernelGraph:
    """A graph of launches made through the C ABI."""

    def __init__(self, stream: Stream, launches: int, launch: Callable[[int], None]) -> None:
        self.launches = launches
        self._stream = stream
        # Thread-local mode makes CUDA refuse what a launch must not do: allocate or synchronize.
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        checked("cuStreamBeginCapture", driver.cuStreamBeginCapture(stream.handle, mode))
        try:
            for i in range(launches):
                launch(i)
        except BaseException:
            driver.cuStreamEndCapture(stream.handle)  # leaves capture mode; its graph is invalid
            raise
        graph = checked("cuStreamEndCapture", driver.cuStreamEndCapture(stream.handle))
        try:
            self._executable = checked("cuGraphInstantiate", driver.cuGraphInstantiate(graph, 0))
        finally:
            driver.cuGraphDestroy(graph)

    def enqueue(self) -> None:
        checked("cuGraphLaunch", driver.cuGraphLaunch(self._executable, self._stream.handle))

    def close(self) -> None:
        if self._executable is not None:
            driver.cuGraphExecDestroy(self._executable)
            self._executable = None


class TorchGraph:
    """A graph of torch's launches, captured by torch: its allocator must know of the capture."""

    def __init__(self, stream: Stream, launches: int, launch: Callable[[int], None]) -> None:
        self.launches = launches
        self._stream = stream
        self._graph = torch.cuda.CUDAGraph()
        with stream.torch():
            self._graph.capture_begin(capture_error_mode="thread_local")
            try:
                for i in range(launches):
                    launch(i)
            finally:
                self._graph.capture_end()

    def enqueue(self) -> None:
        with self._stream.torch():
            self._graph.replay()

    def close(self) -> None:
        self._graph.reset()


class Spin:
    """One thread that waits for `cycles` of the SM clock: its time gives the clock."""

    launches = 1

    def __init__(self, stream: Stream, cycles: int) -> None:
        self._stream = stream
        self._cycles = cycles

    def enqueue(self) -> None:
        with self._stream.torch():
            # Private, but torch's own tests have used it since the first releases.
            torch.cuda._sleep(self._cycles)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Nothing was captured."""


def followed(
    launch: Callable[[int], None], then: Callable[[int], None] | None
) -> Callable[[int], None]:
    """A launch followed by `then`; without `then` the launch itself."""
    if then is None:
        return launch

    def both(i: int) -> None:
        launch(i)
        then(i)

    return both


def rotating(launch: Callable[[int], None], over: Sequence[int] | None) -> Callable[[int], None]:
    return launch if over is None else lambda i: launch(over[i % len(over)])


def context_is_dead() -> str:
    """The name of the error that has ruined this process's CUDA context; "" if it works."""
    (status,) = driver.cuCtxSynchronize()
    return "" if status == driver.CUresult.CUDA_SUCCESS else str(driver.CUresult(status).name)


def fill_bytes(pointer: int, value: int, size: int, stream: Stream) -> None:
    """Enqueue a memset."""
    if size:
        checked(
            "cuMemsetD8Async",
            driver.cuMemsetD8Async(ctypes.c_uint64(pointer).value, value, size, stream.handle),
        )
