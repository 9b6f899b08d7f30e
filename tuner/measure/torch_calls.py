"""Torch's own calls on the same problem, timed like a candidate: the default and its rivals.

The problem's workload lists the calls (`tuner.workloads`); the first that torch accepts is the
default, what a program runs without us. Its rivals are other calls, of programs that know more,
such as where groups end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from tuner.measure.bench import Bench, Prepared
from tuner.measure.graphs import Replay, Stream, TorchGraph, followed, rotating, rough_us
from tuner.workloads.operands import Operands
from tuner.workloads.ways import first_that_runs
from tuner.workloads.workload import Way

_LOG = logging.getLogger(__name__)

_WARM_LAUNCHES = 3


class TorchCall:
    """The first of `ways` that runs on a bench's operands; the default if `ways` is None."""

    def __init__(
        self, operands: Operands, stream: Stream, ways: Sequence[Way] | None = None
    ) -> None:
        self._operands = operands
        self._stream = stream
        self.is_to_be_beaten = True  # as the default is
        problem = operands.problem
        ways = operands.workload.defaults(problem) if ways is None else ways
        with stream.torch():
            self.name, self._launches = first_that_runs(ways, problem, operands.sets, operands.room)
            for i in range(_WARM_LAUNCHES):
                self.launch(i)

    def launch(self, i: int) -> None:
        self.compute(i)

    def compute(self, i: int) -> torch.Tensor:
        return self._launches[i % len(self._launches)]()

    def estimate_us(self) -> float:
        """Rough time per launch, host overhead included."""
        with self._stream.torch():
            return rough_us(self._stream, _WARM_LAUNCHES, self.launch)

    def capture(
        self,
        launches: int,
        then: Callable[[int], None] | None = None,
        over: Sequence[int] | None = None,
    ) -> TorchGraph:
        """A graph of `launches` launches, each followed by what `then` enqueues.

        `over`: the operand sets to rotate over, by default all.
        """
        return TorchGraph(self._stream, launches, followed(rotating(self.launch, over), then))


def rivals(operands: Operands, stream: Stream, default: str) -> list[TorchCall]:
    """The alternatives that the finals time beside the default, if torch accepts them."""
    accepted = []
    for way in operands.workload.alternatives(operands.problem):
        if not way.rival or way.name == default or not way.takes(operands.problem):
            continue
        try:
            rival = TorchCall(operands, stream, (way,))
            rival.is_to_be_beaten = way.is_to_be_beaten
            accepted.append(rival)
        except torch.AcceleratorError:
            raise
        except (RuntimeError, TypeError, ValueError) as error:  # out of memory is a RuntimeError
            _LOG.warning("torch refuses %s for %s: %s", way.name, operands.problem, error)
    return accepted


@contextmanager
def captured_beside(
    bench: Bench,
    contenders: Sequence[Prepared],
    launches: Sequence[int],
    then: Callable[[int], None] | None = None,
    over: Sequence[int] | None = None,
) -> Iterator[list[Replay]]:
    """Graphs of the contenders, then of the default, with `launches` launches; closed at the end.

    Each number of launches beyond the contenders' makes a graph of the default. `then` and `over`
    are as in `Bench.capture`.

    Raises:
        CandidateFailed, ContextDead
    """
    default = TorchCall(bench.operands, bench.stream)  # its operands live as long as its graph
    graphs: list[Replay] = []
    try:
        for contender, count in zip(contenders, launches, strict=False):
            # Appended one by one: if a later capture fails, the earlier graphs are closed.
            graphs.append(bench.capture(contender, count, then, over))
        for count in launches[len(contenders) :]:
            graphs.append(default.capture(count, then, over))
        yield graphs
    finally:
        for graph in graphs:
            graph.close()
