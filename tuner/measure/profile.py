"""Which kernels the default runs: one launch of it under torch's profiler.

The profiler loads CUPTI, which stays attached to the process once it was used; detaching it breaks
CUDA graphs. So a process that profiles must never time anything: `CudaDevice` keeps a child of its
own for it. The names are a hint, never a measurement: if the profiler does not work (no CUPTI, no
permission to use it) the names are unknown, a warning says why, and the run goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch.autograd.profiler import profile
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, supported_activities

from tuner.measure.graphs import Event, Stream
from tuner.measure.torch_calls import TorchCall

MAX_NAMES = 16
"""A batched FP8 launch is a call per batch entry: the first few are like all others."""

_LOG = logging.getLogger(__name__)


def kernels_run(call: TorchCall, stream: Stream) -> tuple[str, ...]:
    """Names of the kernels and memsets of one launch, in the order they started; () if unknown.

    The first MAX_NAMES only.
    """
    if ProfilerActivity.CUDA not in supported_activities():  # type: ignore[no-untyped-call]
        _LOG.warning("this torch (%s) cannot trace CUDA kernels", torch.__version__)
        return ()
    try:
        # torch.profiler.profile is made of this, but imports torch's compiler: that takes seconds.
        with profile(use_cpu=False, use_device="cuda", use_kineto=True, acc_events=True) as trace:
            with stream.torch():
                call.launch(0)
            launched = Event()
            launched.record(stream)
            launched.wait()
        names = names_in(trace.function_events or ())
    except Exception as error:  # noqa: BLE001 - the names are only a hint: any error may pass
        _LOG.warning("profiling cuBLAS failed: %s", error)
        return ()
    if not names:
        _LOG.warning("the profiler saw no kernel of cuBLAS: CUPTI is missing, or not permitted")
    return names


def names_in(events: Iterable[FunctionEvent]) -> tuple[str, ...]:
    on_gpu = [event for event in events if event.device_type.name == "CUDA"]
    on_gpu.sort(key=lambda event: event.time_range.start)
    return tuple(event.name for event in on_gpu[:MAX_NAMES])
