"""cuBLAS on the same problem, called the way a torch program calls it.

bf16 and fp16 go through `torch.mm(out=)`, batched ones through `torch.bmm(out=)`, with torch's
default settings (reduced-precision reductions allowed, cuBLASLt's own heuristics). FP8 goes
through `torch._scaled_mm` with fast accumulation, cuBLAS's fastest variant, once per batch entry:
it has no batched form. FP8 extents K or N that are no multiple of 16 are refused by cuBLAS; the
baseline is then what a user would have to do, a bf16 product of operands cast beforehand (the
cast is not timed). The launches rotate over the same operands and are captured and timed like a
candidate's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from tuner.measure.bench import Bench, Prepared
from tuner.measure.graphs import Event, Replay, Stream, TorchGraph, followed
from tuner.measure.operands import Operands, OperandSet, free_bytes

FP8_MULTIPLE = 16
_WARM_LAUNCHES = 3


class Baseline:
    """cuBLAS on a bench's operands. `name` says through which torch call."""

    def __init__(self, operands: Operands, stream: Stream) -> None:
        self._operands = operands
        self._stream = stream
        self.name, self._launches = _launches(operands, stream)
        with stream.torch():
            for i in range(_WARM_LAUNCHES):
                self.launch(i)

    def launch(self, i: int) -> None:
        """Enqueue the i-th launch on torch's current stream."""
        self._launches[i % len(self._launches)]()

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


def _launches(operands: Operands, stream: Stream) -> tuple[str, list[Callable[[], None]]]:
    problem = operands.problem
    if problem.operation.is_narrow_float:
        if problem.k % FP8_MULTIPLE or problem.n % FP8_MULTIPLE:
            return "torch.mm on bf16 copies", _upcast(operands, stream)
        return "torch._scaled_mm", [_scaled(operands, s) for s in operands.sets]
    if problem.batch > 1:
        return "torch.bmm", [_bmm(s.a, s.b, s.d) for s in operands.sets]
    return "torch.mm", [_mm(s.a[0], s.b[0], s.d[0]) for s in operands.sets]


def _mm(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor) -> Callable[[], None]:
    return lambda: _discard(torch.mm(a, b, out=d))


def _bmm(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor) -> Callable[[], None]:
    return lambda: _discard(torch.bmm(a, b, out=d))


def _scaled(operands: Operands, operand_set: OperandSet) -> Callable[[], None]:
    scale_a, scale_b = operands.scale_a, operands.scale_b
    assert scale_a is not None and scale_b is not None  # noqa: S101, PT018 - FP8 has both
    entries = list(zip(operand_set.a, operand_set.b, operand_set.d, strict=True))

    def launch() -> None:
        for a, b, d in entries:
            torch._scaled_mm(
                a,
                b,
                scale_a=scale_a,
                scale_b=scale_b,
                out_dtype=d.dtype,
                use_fast_accum=True,
                out=d,
            )

    return launch


def _upcast(operands: Operands, stream: Stream) -> list[Callable[[], None]]:
    """bf16 products over copies of as many sets as a quarter of the free memory takes."""
    first = operands.sets[0]
    free = free_bytes(operands.ordinal)
    fitting = max(1, free // 4 // (2 * (first.a.numel() + first.b.numel())))
    with stream.torch():
        copies = [
            (s.a.to(torch.bfloat16), s.b.to(torch.bfloat16), s.d) for s in operands.sets[:fitting]
        ]
    if operands.problem.batch > 1:
        return [_bmm(a, b, d) for a, b, d in copies]
    return [_mm(a[0], b[0], d[0]) for a, b, d in copies]


def _discard(_: torch.Tensor) -> None:
    """Results land in `out=`."""
