"""The default on the same problem: what a torch program runs without us, timed like a candidate.

Which call that is, its workload says (`tuner.workloads`): the first of those that torch takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from tuner.measure.bench import Bench, Prepared
from tuner.measure.graphs import Event, Replay, Stream, TorchGraph, followed
from tuner.workloads.operands import Operands
from tuner.workloads.ways import first_that_runs

_WARM_LAUNCHES = 3


class Baseline:
    """The default on a bench's operands. `name` says through which torch call."""

    def __init__(self, operands: Operands, stream: Stream) -> None:
        self._operands = operands
        self._stream = stream
        problem = operands.problem
        with stream.torch():
            self.name, self._launches = first_that_runs(
                operands.workload.defaults(problem), problem, operands.sets, operands.room
            )
            for i in range(_WARM_LAUNCHES):
                self.launch(i)

    def launch(self, i: int) -> None:
        """Enqueue the i-th launch on torch's current stream."""
        self.compute(i)

    def compute(self, i: int) -> torch.Tensor:
        """Likewise; gives where the result is going to be."""
        return self._launches[i % len(self._launches)]()

    def estimate_us(self) -> float:
        """Rough time per launch, host overhead included."""
        before, after = Event(), Event()
        with self._stream.torch():
            before.record(self._stream)
            for i in range(_WARM_LAUNCHES):
                self.launch(i)
            after.record(self._stream)
        after.wait()
        return after.microseconds_since(before) / _WARM_LAUNCHES

    def capture(self, launches: int, then: Callable[[int], None] | None = None) -> TorchGraph:
        """A graph of `launches` launches, each followed by what `then` enqueues."""
        return TorchGraph(self._stream, launches, followed(self.launch, then))


@contextmanager
def captured_beside(
    bench: Bench,
    contenders: Sequence[Prepared],
    launches: Sequence[int],
    then: Callable[[int], None] | None = None,
) -> Iterator[list[Replay]]:
    """Graphs of the contenders, then of cuBLAS, of so many launches each; closed afterwards.

    There is one of cuBLAS for each number of launches that is left. `then` as in `Bench.capture`.

    Raises:
        CandidateFailed, ContextDead
    """
    baseline = Baseline(bench.operands, bench.stream)  # its operands live as long as its graph
    graphs: list[Replay] = []
    try:
        for contender, count in zip(contenders, launches, strict=False):
            graphs.append(bench.capture(contender, count, then))  # closed if a later one fails
        for count in launches[len(contenders) :]:
            graphs.append(baseline.capture(count, then))
        yield graphs
    finally:
        for graph in graphs:
            graph.close()
