"""The measuring process: `python -m benchmarks.peers.child ORDINAL`, one request a line on stdin.

Only this process imports torch. Messages go to a copy of stdout, and stdout itself is redirected to
stderr, because libraries print to it.
"""

from __future__ import annotations

import gc
import os
import sys

import msgspec

from benchmarks.peers.records import Done, Message, Ready, Request, Row
from tuner.errors import DeviceError

EXIT_DEAD = 70


def main() -> int:
    """Serve requests until stdin ends or the CUDA context is dead."""
    output = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    encoder = msgspec.json.Encoder()

    def send(message: Message) -> None:
        output.write(encoder.encode(message) + b"\n")

    ordinal = int(sys.argv[1])
    import torch

    from benchmarks.peers.measure import ContextDead, Runner
    from tuner.measure.environment import open_gpu
    from tuner.measure.graphs import Stream, context_is_dead
    from tuner.measure.local_gpu import local_gpu

    model = local_gpu(ordinal)
    if model is None:
        print(f"no CUDA device {ordinal} here; run `gemmsmith doctor`", file=sys.stderr)
        return 1
    monitor, software = open_gpu(model, ordinal)
    runner = Runner(model=model, ordinal=ordinal, stream=Stream(), monitor=monitor, send=send)
    send(Ready(device=model, environment=software))
    for line in sys.stdin.buffer:
        request = msgspec.json.decode(line, type=Request)
        try:
            row = runner.measure(request)
        except ContextDead as error:
            print(error, file=sys.stderr)
            return EXIT_DEAD
        except (DeviceError, RuntimeError) as error:  # torch raises RuntimeError for CUDA errors
            if context_is_dead():
                print(error, file=sys.stderr)
                return EXIT_DEAD
            row = Row(problem=request.problem, failure=str(error).splitlines()[0])
        send(Done(row=row))
        gc.collect()
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
