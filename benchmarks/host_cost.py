"""The host's time of a product: gemmsmith's operators and `patch` beside torch's operators.

    python -m benchmarks.host_cost                              # on the CPU, with stand-in kernels
    python -m benchmarks.host_cost --winners winners.gspack     # on a GPU, a baked file's kernels

A training step is launched ahead of the GPU, so calls are free while the host stays ahead. This
measures the host's time of a call. Each way to multiply is called 10,000 times, 100 in a turn, and
the ways take turns. The median over the turns is printed, with the middle 90%. Ways under `patch()`
come after all others, because what it registers with torch's dispatcher stays there. Between turns
the program waits for the GPU, so that no call waits for room in the GPU's queue. On the CPU,
torch's figures include the product itself, and the stand-in kernel's a product of 2×8×8 in plain C:
there the difference between "no winner" and torch is the cost of the decision.

A layer of experts is a grouped product, of balanced groups. It is left out if a baked file has no
winner for one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional

import gemmsmith
from gemmsmith import Bundle, Lookup, Snapshot
from gemmsmith.core.operation import of_dtype
from gemmsmith.core.problem import Layout, Problem
from gemmsmith.ops.below.dispatch import Dispatch
from gemmsmith.ops.engine import source
from gemmsmith.ops.engine.engine import Engine
from tests.support import stand_in

CALLS = 10_000
TURN = 100
SMALL = Problem(m=2, n=8, k=8)
SMALL_EXPERTS = Problem(m=8, n=16, k=16, batch=2, dtype="bf16.group_rows")
LINEAR = ("bf16", "bf16")
GROUPED = ("bf16.group_rows", "bf16.group_depth")
"""Operations of a layer of experts: tokens by weights, and tokens by tokens (weights' gradient)."""
GRADIENTS = ", with gradients"

Call = Callable[[], object]
Context = Callable[[], contextlib.AbstractContextManager[Any]]
nothing = contextlib.nullcontext


@dataclass(frozen=True, kw_only=True)
class Place:
    """A device, products, and sources with and without winners for them.

    Attributes:
        device: torch's device of the operands.
        linear: product of a linear layer.
        experts: product of a layer of experts, if there is a winner for one.
        winner, none: a source that has winners of these products, and one that has not.
    """

    name: str
    device: str
    linear: Problem
    experts: Problem | None
    winner: Any
    none: Any


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to multiply: the source of winners, the context of the calls, and the call."""

    name: str
    source: Any
    context: Context
    call: Call


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Microseconds of a call: the median of the turns, and the middle 90% of them."""

    way: str
    us: float
    low_us: float
    high_us: float
    calls: int


@contextlib.contextmanager
def on_cpu() -> Iterator[Place]:
    """Yield the CPU, with stand-in kernels instead of a GPU's."""
    torch.set_num_threads(1)  # otherwise torch's threads that wait for each other are measured
    host = stand_in.Host()
    host.kind = "cpu"
    Dispatch.of("cpu", stream=host.stream)
    engine = mock.patch.object(source, "Engine", partial(Engine, platform=host))
    with engine, tempfile.TemporaryDirectory() as folder:
        packs = stand_in.Packs(stand_in.build(Path(folder)))
        yield Place(
            name=f"the CPU ({platform.processor() or platform.machine()})",
            device="cpu",
            linear=SMALL,
            experts=SMALL_EXPERTS,
            winner=(stand_in.Chooser(), packs),
            none=(stand_in.Chooser(answers=lambda _: False), packs),
        )


@contextlib.contextmanager
def on_gpu(winners: Path) -> Iterator[Place]:
    """Yield the GPU, with small forward products of a baked file, see `smallest`."""
    bundle = Bundle.open(winners)
    linear = smallest(bundle.snapshot, *LINEAR)
    if linear is None:
        raise SystemExit(f"{winners} has no kernel for a bf16 linear layer: nothing to time")
    yield Place(
        name=torch.cuda.get_device_name(),
        device="cuda",
        linear=linear,
        experts=smallest(bundle.snapshot, *GROUPED),
        winner=bundle,
        none=(Lookup(Snapshot.of(bundle.snapshot.device, []), pin=True), bundle.packs),
    )


def smallest(snapshot: Snapshot, forward: str, of_weights: str) -> Problem | None:
    """Return the smallest layer of those whose output and gradients have the most kernels.

    Args:
        snapshot: the winners.
        forward: dtype of the products of a layer's output and of its input's gradient.
        of_weights: dtype of the product of its weight's gradient.
    """
    lookup = Lookup(snapshot, pin=True)

    def kernels(layer: Problem) -> int:
        m, n, k = layer.m, layer.n, layer.k
        products = (
            (forward, Layout.TN, m, n, k),
            (forward, Layout.TT, m, k, n),
            (of_weights, Layout.NT, n, k, m),
        )
        return sum(lookup.lookup(*product, layer.batch) is not None for product in products)

    is_grouped = of_dtype(forward).is_grouped
    layers = [
        p
        for p in (row.problem for row in snapshot.rows)
        if (p.dtype, p.layout) == (forward, Layout.TN)
        and (p.batch == 1 or is_grouped)
        and lookup.lookup(forward, Layout.TN, p.m, p.n, p.k, p.batch)
    ]
    return min(layers, key=lambda layer: (-kernels(layer), layer.flops), default=None)


def ways(place: Place) -> list[Way]:
    """Return every way, forward only and with both gradients."""
    return [
        replace(way, name=way.name + (GRADIENTS if gradients else ""))
        for gradients in (False, True)
        for layer in (linear, experts)
        for way in layer(place, gradients)
    ]


def linear(place: Place, gradients: bool) -> list[Way]:
    """Return the ways to compute a linear layer."""
    problem = place.linear
    x = torch.randn(problem.m, problem.k, device=place.device).bfloat16()
    x.requires_grad_(gradients)
    model = nn.Linear(problem.k, problem.n, bias=False, dtype=x.dtype, device=x.device)
    model.requires_grad_(gradients)
    of = partial(passes, x, model.weight, problem.n)
    plain = of(partial(functional.linear, x, model.weight))
    ours = of(partial(gemmsmith.linear, x, model.weight))
    module = of(partial(model, x))
    within = partial(gemmsmith.patch, model)
    return [
        Way(name=name, source=source_, context=context, call=call)
        for name, source_, context, call in (
            ("F.linear", None, nothing, plain),
            ("gemmsmith.linear, use() not called", None, nothing, ours),
            ("gemmsmith.linear, no winner", place.none, nothing, ours),
            ("gemmsmith.linear, a winner", place.winner, nothing, ours),
            ("F.linear under patch(), no winner", place.none, gemmsmith.patch, plain),
            ("F.linear under patch(), a winner", place.winner, gemmsmith.patch, plain),
            ("nn.Linear", None, nothing, module),
            ("nn.Linear under patch(model), a winner", place.winner, within, module),
        )
    ]


def experts(place: Place, gradients: bool) -> list[Way]:
    """Return the ways to compute a layer of experts, if the place has one.

    Its weights are [experts, N, K], passed as `weight.transpose(-2, -1)`, as transformers does.
    """
    problem = place.experts
    if problem is None:
        return []
    x = torch.randn(problem.m, problem.k, device=place.device).bfloat16()
    stored = torch.randn(problem.batch, problem.n, problem.k, device=place.device).bfloat16()
    weight = stored.transpose(-2, -1)
    ends = [problem.m * (i + 1) // problem.batch for i in range(problem.batch)]
    offsets = torch.tensor(ends, dtype=torch.int32, device=place.device)
    x.requires_grad_(gradients)
    weight.requires_grad_(gradients)
    of = partial(passes, x, weight, problem.n)
    plain = of(partial(functional.grouped_mm, x, weight, offs=offsets))
    ours = of(partial(gemmsmith.grouped_mm, x, weight, offsets))
    return [
        Way(name=name, source=source_, context=context, call=call)
        for name, source_, context, call in (
            ("F.grouped_mm", None, nothing, plain),
            ("gemmsmith.grouped_mm, a winner", place.winner, nothing, ours),
            ("F.grouped_mm under patch(), no winner", place.none, gemmsmith.patch, plain),
            ("F.grouped_mm under patch(), a winner", place.winner, gemmsmith.patch, plain),
        )
    ]


def passes(x: torch.Tensor, weight: torch.Tensor, n: int, multiply: Call) -> Call:
    """Return `multiply`, or a call of it with both gradients if `x` requires them."""
    if not x.requires_grad:
        return multiply
    dy = x.new_ones(x.shape[0], n)

    def both() -> object:
        product: Any = multiply()
        return torch.autograd.grad(product, (x, weight), dy)

    return both


def costs(place: Place, calls: int) -> list[Cost]:
    """Measure all ways in turns, those under `patch` after the others."""
    all_ways = ways(place)
    times: dict[str, list[float]] = {way.name: [] for way in all_ways}
    for patched in (False, True):
        group = [way for way in all_ways if (way.context is not nothing) == patched]
        for _ in range(max(1, calls // TURN)):
            for way in group:
                times[way.name].append(_turn(way))
    gemmsmith.use(None)
    return [
        Cost(
            way=name,
            us=statistics.median(turns),
            low_us=sorted(turns)[len(turns) // 20],
            high_us=sorted(turns)[-1 - len(turns) // 20],
            calls=len(turns) * TURN,
        )
        for name, turns in times.items()
    ]


def _turn(way: Way) -> float:
    """Return microseconds of a call, the mean over a turn."""
    gemmsmith.use(way.source)
    with way.context():
        for _ in range(3):  # plans the call and loads its kernel
            way.call()
        _settle()
        began = time.perf_counter()
        for _ in range(TURN):
            way.call()
        spent = time.perf_counter() - began
        _settle()
    return spent / TURN * 1e6


def table(costs: Sequence[Cost]) -> str:
    """Write the figures in Markdown, both kinds of call of a way in a row."""
    cost = {item.way: item.us for item in costs}
    rows = [
        f"| {way} | {us:.1f} µs | {cost[way + GRADIENTS]:.1f} µs |"
        for way, us in cost.items()
        if not way.endswith(GRADIENTS)
    ]
    return "\n".join(["| | forward | forward and both gradients |", "|---|---|---|", *rows])


def put(page: Path, text: str) -> None:
    """Replace the text between a page's markers."""
    before, mark, rest = page.read_text(encoding="utf-8").partition("<!-- host cost -->\n")
    _, end, after = rest.partition("<!-- /host cost -->")
    if not end:
        raise SystemExit(f"{page} has no place for the table: <!-- host cost --> and its end")
    page.write_text(f"{before}{mark}{text}\n{end}{after}", encoding="utf-8")


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> int:
    """Print the table; with -o, write it as JSON too."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--winners", type=Path, help="a baked file, on a GPU of its model")
    parser.add_argument("--calls", type=int, default=CALLS, help="calls of each way")
    parser.add_argument("-o", "--output", type=Path, help="where to write the figures as JSON")
    parser.add_argument("--page", type=Path, help="where to put the table: docs/training.md")
    options = parser.parse_args()
    with on_gpu(options.winners) if options.winners else on_cpu() as place:
        measured = costs(place, options.calls)
        layer = place.linear
        document = {
            "device": place.name,
            "torch": torch.__version__,
            "problem": f"{layer.m}x{layer.n}x{layer.k} bf16",
            "experts": str(place.experts) if place.experts else None,
            "costs": [asdict(cost) for cost in measured],
        }
    print(f"{document['problem']} on {document['device']}, torch {document['torch']}")
    if place.experts:
        print(f"experts: {place.experts}")
    for cost in measured:
        print(f"{cost.us:8.2f} µs  ({cost.low_us:.2f} … {cost.high_us:.2f})  {cost.way}")
    if options.output:
        options.output.write_text(json.dumps(document, indent=1) + "\n")
    if options.page:
        put(options.page, table(measured))
    return 0


if __name__ == "__main__":
    sys.exit(main())
