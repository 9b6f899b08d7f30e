"""The process that a profiler watches: `python -m tuner.profiling.launches ORDER`.

Operands, packs, the default's choice and the verification come before it is watched. Then each
contestant is launched a few times: for Nsight Compute between the calls that start and stop its
counting, else under torch's profiler, which writes one Chrome trace of all contestants.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.problem import Problem
from gemmsmith.files import publish
from tuner.errors import DeviceError
from tuner.measure.child import TF32_OVERRIDES
from tuner.measure.local_gpu import local_gpu

if TYPE_CHECKING:
    from tuner.measure.bench import Bench

SEED = 20261126


class Contestant(msgspec.Struct, frozen=True, kw_only=True):
    """What is launched: a candidate from its pack; the default if both are None."""

    name: str
    candidate: Candidate | None = None
    pack: str | None = None


class LaunchOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What to launch, and the files to write.

    Attributes:
        launches: of each contestant. For groups, their spreads of tokens take turns.
        environment: gets the software as JSON.
        trace: gets the Chrome trace; None if Nsight Compute watches.
    """

    problem: Problem
    contestants: tuple[Contestant, ...]
    launches: int
    ordinal: int
    environment: str
    trace: str | None = None


def main(words: list[str]) -> int:
    """Run an order; 0 if everything was launched."""
    from tuner.measure.bench import Bench, CandidateFailed, ContextDead
    from tuner.measure.environment import open_gpu
    from tuner.measure.graphs import Stream
    from tuner.workloads.reference import use_precise_fp32

    order = msgspec.json.decode(words[0], type=LaunchOrder)
    for name in TF32_OVERRIDES:
        os.environ.pop(name, None)
    model = local_gpu(order.ordinal)
    if model is None:
        print(f"no CUDA device {order.ordinal} here", file=sys.stderr)
        return 1
    try:
        _, software = open_gpu(model, order.ordinal)
        use_precise_fp32()
        publish(Path(order.environment), msgspec.json.encode(software))
        bench = Bench(order.problem, model, order.ordinal, Stream(), SEED)
        if order.trace is None:
            launch_all(order, bench, counted)
        else:
            with traced(Path(order.trace)):
                launch_all(order, bench, annotated)
    except (DeviceError, CandidateFailed, ContextDead, RuntimeError) as error:
        print(str(error).partition("\n")[0], file=sys.stderr)
        return 1
    return 0


def launch_all(
    order: LaunchOrder, bench: Bench, watched: Callable[[str], AbstractContextManager[object]]
) -> None:
    """Prepare and launch each contestant; `watched` is entered for the launches alone."""
    for contestant in order.contestants:
        launch = _prepared(contestant, bench)
        _synchronize(order.ordinal)
        with bench.stream.torch(), watched(contestant.name):
            for i in range(order.launches):
                launch(i + 1)  # the set of the verification is the last one
            _synchronize(order.ordinal)


def _prepared(contestant: Contestant, bench: Bench) -> Callable[[int], None]:
    from tuner.measure.torch_calls import TorchCall

    if contestant.candidate is None or contestant.pack is None:
        return TorchCall(bench.operands, bench.stream).launch
    return partial(bench.launch, bench.prepare(contestant.candidate, Path(contestant.pack)))


def _synchronize(ordinal: int) -> None:
    if ordinal >= 0:
        import torch

        torch.cuda.synchronize(ordinal)


@contextmanager
def counted(_name: str) -> Iterator[None]:
    from torch.cuda import profiler

    profiler.start()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        profiler.stop()  # type: ignore[no-untyped-call]


def annotated(name: str) -> AbstractContextManager[object]:
    from torch.profiler import record_function

    return record_function(name)


@contextmanager
def traced(path: Path) -> Iterator[None]:
    from torch.profiler import profile

    with profile() as trace:
        yield
    trace.export_chrome_trace(str(path))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
