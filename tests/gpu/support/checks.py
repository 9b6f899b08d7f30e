"""The checks of schedules, run by the worker on tn kernels.

Every result is compared with the FP64 product of the very operands. Where a schedule claims to add
in a fixed order, equal launches must give equal bits.
"""

from __future__ import annotations

from itertools import cycle, islice

import torch

from gemmsmith import runtime
from gemmsmith.core.candidate import Candidate
from gemmsmith.core.config import Config
from gemmsmith.core.launch import Launch
from gemmsmith.runtime.launch import torch_dtype
from tests.gpu.support.jobs import Job, Verdict
from tests.gpu.support.launching import (
    Launcher,
    operand_a,
    operand_b,
    same_bits,
    share_of_bound,
)
from tuner.workloads.operands import poison

LAUNCHES = 200
REPLAYS = 3
DEPTH = 50
SENTINEL = 7.0
SEED = 20261121
PILE_UP_CYCLES = 60_000_000
"""The GPU sleeps (about 35 ms) while the host enqueues, so that launches run without gaps."""


def numerics(job: Job) -> Verdict:
    """alpha, beta, in-place C, row pitches and FP8 scales; nothing outside D is touched."""
    torch.manual_seed(SEED)
    problem, kernel = job.problem, job.kernel
    a, b = operand_a(problem), operand_b(problem)
    product = a.double() @ b.double()
    d_type = torch_dtype(problem.operation.d)
    # Values of about the product's own size, so that C weighs in the error.
    size = float(product.std()) if product.numel() > 1 else float(product.abs().max())
    pitch = problem.n + 16 if kernel.alignment_d > 1 else problem.n + 9
    c = (torch.randn(problem.m, pitch, device="cuda") * size).to(d_type)[:, : problem.n]
    scales = {}
    if problem.operation.is_narrow_float:
        scales = {
            "scale_a": torch.full((1,), 0.25, device="cuda"),
            "scale_b": torch.full((1,), 3.0, device="cuda"),
        }
    worst = 0.0
    for launch in job.launches:
        config = Config(kernel=kernel, launch=launch)
        for alpha, beta, given in (
            (1.0, 0.0, {}),
            (0.5, -2.0, {}),
            (-1.5, 1.0, scales),
            (2.0, 0.0, scales),
        ):
            store = torch.full((problem.m + 2, pitch), SENTINEL, device="cuda", dtype=d_type)
            out = store[1:-1, 8 : 8 + problem.n]
            factor = alpha * (0.75 if given else 1.0)
            wanted = factor * product + (beta * c.double() if beta else 0.0)
            runtime.run(
                config, a, b, pack_path=job.pack, c=c, out=out, alpha=alpha, beta=beta, **given
            )
            share = share_of_bound(kernel, problem, out, wanted)
            if not share <= 1.0:
                return Verdict(
                    failure=f"{launch.key} alpha {alpha} beta {beta} scales {bool(given)}: "
                    f"error {share:.2f} times its bound"
                )
            worst = max(worst, share)
            store[1:-1, 8 : 8 + problem.n] = SENTINEL
            if not (store == SENTINEL).all():
                return Verdict(failure=f"{launch.key}: wrote outside D")
        total = c.contiguous()
        expected = product + total.double()
        runtime.run(config, a, b, pack_path=job.pack, c=total, out=total, beta=1.0)
        share = share_of_bound(kernel, problem, total, expected)
        if not share <= 1.0:
            return Verdict(failure=f"{launch.key} in place: error {share:.2f} times its bound")
    return Verdict(figures={"error_over_bound": round(worst, 3)})


def in_a_row(job: Job) -> Verdict:
    """200 launches with different operands and one workspace, on a stream, then in a graph.

    Nothing waits between two launches. In the stream every launch has its own output, then all
    have the same one, whose last writer must win; the graph is replayed over poisoned outputs.
    """
    torch.manual_seed(SEED)
    rotation = _Rotation(job)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for output in rotation.outputs:
            poison(output)
        torch.cuda._sleep(PILE_UP_CYCLES)
        for i in range(LAUNCHES):
            rotation.launch(i, rotation.outputs[i])
        failure = rotation.wrong("stream")
        if failure:
            return Verdict(failure=failure)
        torch.cuda._sleep(PILE_UP_CYCLES)
        for i in range(LAUNCHES):
            rotation.launch(i, rotation.outputs[0])
        last = rotation.outputs[0].clone()
        if rotation.unlike(LAUNCHES - 1, last):
            return Verdict(failure="one output for all launches: the last one did not win")
        rotation.launch(0, rotation.outputs[0])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(LAUNCHES):
                rotation.launch(i, rotation.outputs[i])
        for replay in range(REPLAYS):
            for output in rotation.outputs:
                poison(output)
            graph.replay()
            failure = rotation.wrong(f"replay {replay}")
            if failure:
                return Verdict(failure=failure)
        for _ in range(REPLAYS):
            graph.replay()
        failure = rotation.wrong("replays in a row")
    return Verdict(failure=failure or None, figures={"error_over_bound": round(rotation.worst, 3)})


def dependent(job: Job) -> Verdict:
    """D of one launch is A of the next, 50 deep: with room for all, with two buffers, in a graph.

    M×K by K×K. Each product is checked against FP64 of what its A turned out to be; with two
    buffers in turn the same bits must come out (of schedules that add in a fixed order).
    """
    torch.manual_seed(SEED)
    problem, kernel = job.problem, Launcher(job)
    assert problem.n == problem.k
    b = operand_b(problem)
    exact = all(
        Candidate(kernel=job.kernel, launch=launch).has_fixed_order for launch in job.launches
    )
    first = operand_a(problem)
    stages = [first, *(torch.empty_like(first) for _ in range(DEPTH))]
    buffers = [torch.empty_like(first), torch.empty_like(first)]
    workspace = kernel.workspace(first, b, stages[1])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())

    def with_all() -> None:
        for i in range(DEPTH):
            kernel.launch(i, stages[i], b, stages[i + 1], workspace, stream)

    def with_two() -> None:
        source = first
        for i in range(DEPTH):
            kernel.launch(i, source, b, buffers[i % 2], workspace, stream)
            source = buffers[i % 2]

    def wrong(where: str) -> str | None:
        for i in range(DEPTH):
            wanted = stages[i].double() @ b.double()
            share = share_of_bound(job.kernel, problem, stages[i + 1], wanted)
            if not share <= 1.0:
                return f"{where}: product {i} of the chain is {share:.2f} times its bound off"
        if exact and not same_bits(stages[-1], buffers[(DEPTH - 1) % 2]):
            return f"{where}: two buffers in turn gave other bits than a buffer for each"
        return None

    with torch.cuda.stream(stream):
        torch.cuda._sleep(PILE_UP_CYCLES)
        with_all()
        with_two()
        failure = wrong("stream")
        if failure:
            return Verdict(failure=failure)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            with_all()
            with_two()
        for _ in range(REPLAYS):
            for output in (*stages[1:], *buffers):
                poison(output)
            graph.replay()
            failure = wrong("graph")
            if failure:
                return Verdict(failure=failure)
    return Verdict()


class _Rotation:
    """Five As, three Bs, an output for each launch, and the fifteen products in FP64."""

    def __init__(self, job: Job) -> None:
        self.job, self.problem = job, job.problem
        self.loaded = Launcher(job)
        self.a = [operand_a(job.problem) for _ in range(5)]
        self.b = [operand_b(job.problem) for _ in range(3)]
        shape = (self.problem.m, self.problem.n)
        d_type = torch_dtype(self.problem.operation.d)
        self.outputs = [torch.empty(shape, dtype=d_type, device="cuda") for _ in range(LAUNCHES)]
        self.products = [[a.double() @ b.double() for b in self.b] for a in self.a]
        self.workspace = self.loaded.workspace(self.a[0], self.b[0], self.outputs[0])
        self.exact = [
            Candidate(kernel=job.kernel, launch=launch).has_fixed_order
            for launch in islice(cycle(job.launches), LAUNCHES)
        ]
        self.seen: dict[tuple[int, int, Launch], torch.Tensor] = {}
        self.worst = 0.0

    def launch(self, i: int, output: torch.Tensor) -> None:
        a, b = self.a[i % 5], self.b[i % 3]
        self.loaded.launch(i, a, b, output, self.workspace, torch.cuda.current_stream())

    def wrong(self, where: str) -> str:
        """The first output that is wrong, or other than an equal launch's; waits for the GPU."""
        for i, output in enumerate(self.outputs):
            share = share_of_bound(
                self.job.kernel, self.problem, output, self.products[i % 5][i % 3]
            )
            launch = self.job.launches[i % len(self.job.launches)]
            if not share <= 1.0:
                return f"{where}: launch {i} ({launch.key}) is {share:.2f} times its bound off"
            self.worst = max(self.worst, share)
            if self.unlike(i, output):
                return f"{where}: launch {i} ({launch.key}) gave other bits than before"
        return ""

    def unlike(self, i: int, output: torch.Tensor) -> bool:
        """Whether the output differs from an equal launch's first one, as far as that matters."""
        launch = self.job.launches[i % len(self.job.launches)]
        known = self.seen.setdefault((i % 5, i % 3, launch), output.clone())
        if self.exact[i]:
            return not same_bits(known, output)
        wanted = self.products[i % 5][i % 3]
        return not share_of_bound(self.job.kernel, self.problem, output, wanted) <= 1.0
