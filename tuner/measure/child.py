"""The measuring process: `python -m tuner.measure.child`, requests on stdin, replies on stdout.

It imports torch at once, which takes seconds, and opens the GPU at the first request.

It alone imports torch and holds a CUDA context, so a candidate that hangs or crashes takes only
this process with it. The protocol keeps a private copy of stdout and points descriptor 1 at
stderr: nothing that a library prints can break it. The end of stdin ends the process, and so
does the death of the parent, even while a kernel hangs.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from select import select
from typing import TYPE_CHECKING, BinaryIO

from tuner.errors import DeviceError, NoGpu
from tuner.measure.local_gpu import local_gpu
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
    decode_request,
    encode,
)

if TYPE_CHECKING:
    from tuner.measure.batch import Batches

EXIT_DEAD = 70
"""Exit status after `Dead`."""

EXIT_ORPHANED = 71
"""Exit status when the parent died first."""

TF32_OVERRIDES = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
"""Variables that would silently make the FP32 reference a TF32 one."""


def main() -> int:
    """Serve requests until `Quit`, the end of stdin, or a dead CUDA context."""
    output = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    for name in TF32_OVERRIDES:
        os.environ.pop(name, None)
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()
    blamed = NOBODY

    def send(reply: Reply) -> None:
        nonlocal blamed
        if isinstance(reply, Started):
            blamed = reply.index
        elif isinstance(reply, EntrantOutcome):
            blamed = NOBODY
        output.write(encode(reply))

    with suppress(ImportError):  # raised again where it is reported
        _import_torch()
        if not select([sys.stdin], [], [], 0)[0]:  # no request waits
            _import_compiler()
    requests = _requests(sys.stdin.buffer)
    hello = next(requests, None)
    if not isinstance(hello, Hello):
        return 0
    try:
        batches, ready = _open(hello.ordinal, send)
    except (DeviceError, ImportError) as error:
        send(Refused(error=type(error).__name__, message=str(error)))
        return 1
    send(ready)

    from tuner.measure.bench import ContextDead
    from tuner.measure.graphs import context_is_dead

    for request in requests:
        try:
            reply = batches.answer(request)
        except ContextDead as error:
            send(Dead(index=blamed, message=str(error)))
            return EXIT_DEAD
        except (DeviceError, RuntimeError) as error:  # torch raises RuntimeError for CUDA's
            dead = context_is_dead()
            if dead:
                send(Dead(index=blamed, message=f"{dead}: {error}"))
                return EXIT_DEAD
            kind = type(error).__name__ if isinstance(error, DeviceError) else "DeviceError"
            reply = Refused(error=kind, message=str(error))
        send(reply)
    return 0


def _import_torch() -> None:
    from tuner.measure import batch, environment  # noqa: F401 - both import it


def _import_compiler() -> None:
    """Import what `torch.compile` needs, which the first finals of a fused product wait for."""
    import torch._inductor.compile_fx  # noqa: F401


def _watch(parent: int) -> None:
    # The main thread may be waiting for a kernel that hangs.
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(EXIT_ORPHANED)


def _requests(source: BinaryIO) -> Iterator[Request]:
    for line in source:
        request = decode_request(line)
        if isinstance(request, Quit):
            return
        yield request


def _open(ordinal: int, send: Callable[[Reply], None]) -> tuple[Batches, Ready]:
    """Import torch, create the CUDA context, describe the GPU and the software."""
    model = local_gpu(ordinal)
    if model is None:
        raise NoGpu(f"no CUDA device {ordinal} here; run `gemmsmith doctor`")
    from tuner.measure.batch import Batches
    from tuner.measure.environment import open_gpu
    from tuner.measure.graphs import Stream
    from tuner.workloads.reference import use_precise_fp32

    monitor, software = open_gpu(model, ordinal)
    use_precise_fp32()
    batches = Batches(model=model, ordinal=ordinal, stream=Stream(), monitor=monitor, send=send)
    return batches, Ready(model=model, environment=software)


if __name__ == "__main__":
    # os._exit: tearing a CUDA context down in order can hang when a kernel misbehaved.
    status = main()
    sys.stderr.flush()
    os._exit(status)
