"""What a product costs the host: gemmsmith's operators and `patch` beside torch's own.

    python -m benchmarks.host_cost                              # on the CPU, with stand-in kernels
    python -m benchmarks.host_cost --winners winners.gspack     # on a GPU, a baked file's kernels

A training step is launched ahead of the GPU, so calls are free while the host stays ahead; this
says how long it takes for one. Each way to multiply is called 10,000 times, 100 in a turn, the ways
in turns one after the other; the median over the turns is printed, and where 90% of them lie.
Between turns the GPU is waited for, so that none waits for room in its queue. On the CPU torch's
figures hold the product itself, and the stand-in kernel's a product of 2×8×8 in plain C: there the
difference between "no winner" and torch is what deciding costs.
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
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional

import gemmsmith
from gemmsmith import Bundle, Lookup, Snapshot
from gemmsmith.ops.below.dispatch import Dispatch
from gemmsmith.ops.engine import source
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.problem import DType, Layout
from tests.support import stand_in

CALLS = 10_000
TURN = 100
SMALL = (2, 8, 8)
GRADIENTS = ", with gradients"

Call = Callable[[], object]
Context = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Operands of a product, a source that has a winner for it, and one that has none."""

    name: str
    x: torch.Tensor
    weight: torch.Tensor
    winner: Any
    none: Any


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to multiply: what is used, around what, and the call."""

    name: str
    source: Any
    context: Context
    call: Call


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Microseconds of one call: median of the turns, and the middle 90% of them."""

    way: str
    us: float
    low_us: float
    high_us: float
    calls: int


@contextlib.contextmanager
def on_cpu() -> Iterator[Place]:
    """The host with stand-in kernels in the GPU's place."""
    m, n, k = SMALL
    torch.set_num_threads(1)  # threads that wait for each other are no cost of ours
    host = stand_in.Host()
    host.kind = "cpu"
    Dispatch.of("cpu", stream=host.stream)
    played = mock.patch.object(source, "Engine", partial(Engine, platform=host))
    with played, tempfile.TemporaryDirectory() as folder:
        packs = stand_in.Packs(stand_in.build(Path(folder)))
        yield Place(
            name=f"the CPU ({platform.processor() or platform.machine()})",
            x=torch.randn(m, k).bfloat16(),
            weight=torch.randn(n, k).bfloat16(),
            winner=(stand_in.Chooser(), packs),
            none=(stand_in.Chooser(answers=lambda _: False), packs),
        )


@contextlib.contextmanager
def on_gpu(winners: Path) -> Iterator[Place]:
    """A small forward product of a baked file, if possible one whose gradients have kernels."""
    bundle = Bundle.open(winners)
    lookup = Lookup(bundle.snapshot, pin=True)

    def kernels(m: int, n: int, k: int) -> int:
        products = ((Layout.TN, m, n, k), (Layout.TT, m, k, n), (Layout.NT, n, k, m))
        return sum(lookup.lookup(DType.BF16, *product) is not None for product in products)

    found = [
        (row.problem.m, row.problem.n, row.problem.k)
        for row in bundle.snapshot.rows
        if (row.problem.dtype, row.problem.layout, row.problem.batch) == (DType.BF16, Layout.TN, 1)
        and lookup.lookup(DType.BF16, Layout.TN, row.problem.m, row.problem.n, row.problem.k)
    ]
    if not found:
        raise SystemExit(f"{winners} has no kernel for a bf16 linear layer: nothing to time")
    m, n, k = min(found, key=lambda sizes: (-kernels(*sizes), sizes[0] * sizes[1] * sizes[2]))
    yield Place(
        name=torch.cuda.get_device_name(),
        x=torch.randn(m, k, device="cuda").bfloat16(),
        weight=torch.randn(n, k, device="cuda").bfloat16(),
        winner=bundle,
        none=(Lookup(Snapshot.of(bundle.snapshot.device, []), pin=True), bundle.packs),
    )


def ways(place: Place) -> list[Way]:
    """Every way, forwards alone and with both gradients."""
    found = []
    for gradients in (False, True):
        x = place.x.clone().requires_grad_(gradients)
        outer, inner = place.weight.shape
        model = nn.Linear(inner, outer, bias=False, dtype=x.dtype, device=x.device)
        model.weight.data.copy_(place.weight)
        model.requires_grad_(gradients)
        weight = model.weight
        dy = torch.ones(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)

        def of(multiply: Call, x: Any = x, weight: Any = weight, dy: Any = dy) -> Call:
            if not x.requires_grad:
                return multiply

            def both() -> object:
                product: Any = multiply()
                return torch.autograd.grad(product, (x, weight), dy)

            return both

        plain = of(partial(functional.linear, x, weight))
        ours = of(partial(gemmsmith.linear, x, weight))
        module = of(partial(model, x))
        nothing = contextlib.nullcontext
        within = partial(gemmsmith.patch, model)
        said = GRADIENTS if gradients else ""
        for name, source_, context, call in (
            ("F.linear", None, nothing, plain),
            ("gemmsmith.linear, use() not called", None, nothing, ours),
            ("gemmsmith.linear, no winner", place.none, nothing, ours),
            ("gemmsmith.linear, a winner", place.winner, nothing, ours),
            ("F.linear under patch(), no winner", place.none, gemmsmith.patch, plain),
            ("F.linear under patch(), a winner", place.winner, gemmsmith.patch, plain),
            ("nn.Linear", None, nothing, module),
            ("nn.Linear under patch(model), a winner", place.winner, within, module),
        ):
            found.append(Way(name=name + said, source=source_, context=context, call=call))
    return found


def costs(place: Place, calls: int) -> list[Cost]:
    """What a call of each way costs."""
    found = ways(place)
    turns: list[list[float]] = [[] for _ in found]
    for _ in range(max(1, calls // TURN)):
        for way, times in zip(found, turns, strict=True):
            gemmsmith.use(way.source)
            with way.context():
                for _ in range(3):  # decides, loads
                    way.call()
                _settle()
                began = time.perf_counter()
                for _ in range(TURN):
                    way.call()
                times.append((time.perf_counter() - began) / TURN * 1e6)
                _settle()
    gemmsmith.use(None)
    return [
        Cost(
            way=way.name,
            us=statistics.median(times),
            low_us=sorted(times)[len(times) // 20],
            high_us=sorted(times)[-1 - len(times) // 20],
            calls=len(times) * TURN,
        )
        for way, times in zip(found, turns, strict=True)
    ]


def table(found: Sequence[Cost]) -> str:
    """The figures as a page shows them, both kinds of call of a way in one row."""
    cost = {one.way: one.us for one in found}
    rows = [
        f"| {way} | {us:.1f} µs | {cost[way + GRADIENTS]:.1f} µs |"
        for way, us in cost.items()
        if not way.endswith(GRADIENTS)
    ]
    return "\n".join(["| | forward | forward and both gradients |", "|---|---|---|", *rows])


def put(page: Path, text: str) -> None:
    """Replace what lies between a page's marks."""
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
    parser.add_argument("--calls", type=int, default=CALLS, help="of each way")
    parser.add_argument("-o", "--output", type=Path, help="where to write the figures as JSON")
    parser.add_argument("--page", type=Path, help="where to put the table: docs/training.md")
    options = parser.parse_args()
    with on_gpu(options.winners) if options.winners else on_cpu() as place:
        found = costs(place, options.calls)
        m, k = place.x.shape
        n = place.weight.shape[0]
        document = {
            "device": place.name,
            "torch": torch.__version__,
            "problem": f"{m}x{n}x{k} bf16",
            "costs": [asdict(cost) for cost in found],
        }
    print(f"{document['problem']} on {document['device']}, torch {document['torch']}")
    for cost in found:
        print(f"{cost.us:8.2f} µs  ({cost.low_us:.2f} … {cost.high_us:.2f})  {cost.way}")
    if options.output:
        options.output.write_text(json.dumps(document, indent=1) + "\n")
    if options.page:
        put(options.page, table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
