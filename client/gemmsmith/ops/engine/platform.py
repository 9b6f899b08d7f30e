"""The devices that an engine runs on. CUDA is the only real platform.

In tests the host replaces it: kernels in C then run on CPU tensors through the same engine.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Protocol, cast

import torch


class Platform(Protocol):
    """Devices, streams and their state. `stream` and `current` are called for every product.

    Attributes:
        kind: torch's name for these devices, where `gemmsmith.ops.below.dispatch` may serve them.
    """

    kind: str | None

    def index(self, device: torch.device) -> int | None:
        """The device's ordinal. Returns None if kernels cannot run on it."""

    def arch(self, index: int) -> str:
        """Architecture of a device, as kernels name it: `sm90`."""

    def sm_count(self, index: int) -> int:
        """Streaming multiprocessors of a device."""

    def stream(self, index: int) -> int:
        """Torch's current stream on a device, as a pointer."""

    def current(self) -> int:
        """Ordinal of this thread's current device."""

    def guard(self, index: int) -> AbstractContextManager[object]:
        """A context in which the device is the current one."""

    def capturing(self) -> bool:
        """Whether the current stream is being captured in a graph."""


class Cuda:
    """NVIDIA GPUs, by torch."""

    kind: str | None = "cuda"

    def __init__(self) -> None:
        # The public functions build a Stream object, or check initialization, on every call.
        fast_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        fast_device = getattr(torch._C, "_cuda_getDevice", None)
        self.stream = fast_stream or _stream
        self.current = fast_device or torch.cuda.current_device

    def index(self, device: torch.device) -> int | None:
        if device.type != "cuda" or torch.version.cuda is None:
            return None
        return torch.cuda.current_device() if device.index is None else device.index

    @functools.cache  # noqa: B019 - one object a process
    def arch(self, index: int) -> str:
        major, minor = torch.cuda.get_device_capability(index)
        return f"sm{major}{minor}"

    @functools.cache  # noqa: B019 - one object a process
    def sm_count(self, index: int) -> int:
        return int(torch.cuda.get_device_properties(index).multi_processor_count)

    def guard(self, index: int) -> AbstractContextManager[object]:
        return cast("AbstractContextManager[object]", torch.cuda.device(index))

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()


def _stream(index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)
