"""Trains a model with stock torch and with gemmsmith's winners, side by side, and compares.

    python examples/train_gpt.py --winners winners.gspack           # or a service's URL
    python examples/train_gpt.py --model llama-8b-blocks --precision fp8 --mode graph

The winners' side is the same model with `gemmsmith.patch(model)`, which replaces its products, and
its feed-forward layers as a whole. All models start with the same weights and get the same
synthetic tokens. A few steps of each alternate, so that clocks and temperature are the same for
all. A third model runs stock torch again: gemmsmith is compared with the mean of the two, and their
difference is the noise of the comparison. Prints tokens per second of each, the paired ratios with
their intervals, the GPU time of matrix products by torch's profiler, and the largest difference of
the loss curves. `-o` writes all of it as JSON, `--picture` draws the loss curves.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import json
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from models import SIZES, Model, Size
from torch import nn
from torch.profiler import ProfilerActivity, profile

import gemmsmith
from gemmsmith.ops.comparing import paired

WARM_STEPS = 3
BLOCK_STEPS = 5
PROFILED_STEPS = 5
WORDS = 256
"""Distinct tokens of the synthetic text."""
_PRODUCT = re.compile(r"gemm|cutlass|nvjet|xmma|splitk|stream_k|split_k|padded", re.IGNORECASE)
"""Names of kernels that compute matrix products, or prepare or finish them, except attention's."""
_ATTENTION = re.compile(r"flash|fmha|attention", re.IGNORECASE)

Step = Callable[[torch.Tensor], torch.Tensor]
Make = Callable[[bool], nn.Module]
"""Makes a model on the device in bf16 that returns the loss of tokens [batch, length + 1]. The
argument is whether this model runs winners, for models that call gemmsmith's operators."""


@dataclass(frozen=True, kw_only=True)
class Product:
    """A kernel of matrix products, with its calls and its microseconds in a step."""

    kernel: str
    calls: float
    us: float


@dataclass(kw_only=True)
class Side:
    """One of the three models: its step, its losses, and the seconds of a step in each block."""

    name: str
    step: Step
    context: Callable[[], contextlib.AbstractContextManager[Any]]
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    products: list[Product] = field(default_factory=list)
    memory: int = 0
    """Peak bytes of a step, beyond the memory that is allocated between steps."""

    @property
    def product_us(self) -> float | None:
        """GPU time of matrix products in a step, in microseconds; None without a GPU."""
        return sum(product.us for product in self.products) or None


def main() -> int:
    """Train and compare, as the options say."""
    options = _options()
    size = SIZES[options.model]

    def make(ours: bool) -> Model:
        multiply = gemmsmith.scaled_mm if ours else torch._scaled_mm
        model = Model(size, fp8=multiply if options.precision == "fp8" else None)
        return model.to(options.device, torch.bfloat16)

    return compare(options, size, make)


def compare(options: argparse.Namespace, size: Size, make: Make) -> int:
    """Train and compare models that `make` makes; `options` are those of this script."""
    device = torch.device(options.device)
    if options.winners:
        gemmsmith.use(options.winners, pin=True)
    torch.manual_seed(options.seed)
    sides = stock, tuned, again = _sides(options, size, make, device)
    batches = _tokens(size, options.steps, device, options.seed)
    for side in sides:
        with side.context():
            side.losses += [float(side.step(batch)) for batch in batches[:WARM_STEPS]]
    orders = itertools.cycle(itertools.permutations(sides))
    for first in range(WARM_STEPS, options.steps, BLOCK_STEPS):
        for side in next(orders):
            _timed(side, batches[first : first + BLOCK_STEPS], device)
    for side in sides:
        side.products = _products(side, batches[-1], device)
    result = _result(options, size, stock, tuned, again)
    if options.output:
        Path(options.output).write_text(json.dumps(result, indent=1) + "\n")
    if options.picture:
        _draw(Path(options.picture), stock, tuned, f"{options.model}, {options.precision}")
    _print(result)
    return 0


def _sides(
    options: argparse.Namespace, size: Size, make: Make, device: torch.device
) -> tuple[Side, ...]:
    sides: list[Side] = []
    weights = None
    for name in ("torch", "gemmsmith", "torch again"):
        ours = name == "gemmsmith"
        model = make(ours)
        weights = weights or copy.deepcopy(model.state_dict())
        model.load_state_dict(weights)
        context: Callable[[], Any] = contextlib.nullcontext
        if ours:
            context = partial(gemmsmith.patch, model)
        with context():
            step = _step(model, options.mode, size, device)
        sides.append(Side(name=name, step=step, context=context))
    return tuple(sides)


def _step(model: nn.Module, mode: str, size: Size, device: torch.device) -> Step:
    """Return a training step: forward, backward, AdamW."""
    captured = mode == "graph"
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, fused=device.type == "cuda", capturable=captured
    )
    forward: Callable[[torch.Tensor], torch.Tensor] = model
    if mode == "compiled":
        forward = torch.compile(model, fullgraph=True, dynamic=False)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = forward(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=not captured)
        return loss.detach()

    return _graphed(step, size, device) if captured else step


def _graphed(step: Step, size: Size, device: torch.device) -> Step:
    """Return a step that is captured as a CUDA graph on its first call, and then replayed."""
    static = torch.zeros(size.batch, size.length + 1, dtype=torch.long, device=device)
    graph: torch.cuda.CUDAGraph | None = None
    loss = torch.zeros((), device=device)
    stream = torch.cuda.Stream(device)

    def replay(tokens: torch.Tensor) -> torch.Tensor:
        nonlocal graph, loss
        static.copy_(tokens)
        if graph is None:
            # Eagerly first, so that kernels are loaded and memory is reserved before the capture.
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                first = step(static).clone()
            torch.cuda.current_stream(device).wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                loss = step(static)
            return first
        graph.replay()
        return loss.clone()

    return replay


def _tokens(size: Size, steps: int, device: torch.device, seed: int) -> list[torch.Tensor]:
    """Return batches of synthetic text in which nine of ten tokens follow from the one before.

    It is learnt quickly. A model that has learnt draws more power than one that has not, and is 2%
    slower because of it. With so few words all sides learn at the same time.
    """
    words = min(size.vocabulary, WORDS)
    generator = torch.Generator().manual_seed(seed)
    following = torch.randperm(words, generator=generator)
    rows = steps * size.batch
    free = torch.randint(words, (size.length + 1, rows), generator=generator)
    follows = torch.rand(size.length + 1, rows, generator=generator) < 0.9
    columns = [free[0]]
    for i in range(1, size.length + 1):
        columns.append(torch.where(follows[i], following[columns[-1]], free[i]))
    return list(torch.stack(columns, dim=1).to(device).split(size.batch))


def _timed(side: Side, batches: list[torch.Tensor], device: torch.device) -> None:
    with side.context():
        _settle(device)
        before = _memory(device)
        began = time.perf_counter()
        losses = [side.step(batch) for batch in batches]
        _settle(device)
        side.seconds.append((time.perf_counter() - began) / len(batches))
        side.memory = max(side.memory, _memory(device, peak=True) - before)
    side.losses += [float(loss) for loss in losses]


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _memory(device: torch.device, *, peak: bool = False) -> int:
    """Return the allocated bytes and reset the peak, or return the peak; 0 without a GPU."""
    if device.type != "cuda":
        return 0
    if peak:
        return torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _products(side: Side, batch: torch.Tensor, device: torch.device) -> list[Product]:
    """Return the kernels of matrix products in a step, the slowest first; empty without a GPU."""
    if device.type != "cuda":
        return []
    with side.context(), profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(PROFILED_STEPS):
            side.step(batch)
        _settle(device)
    products = [
        Product(
            kernel=event.key,
            calls=event.count / PROFILED_STEPS,
            us=event.device_time_total / PROFILED_STEPS,
        )
        for event in profiled.key_averages()
        if _PRODUCT.search(event.key) and not _ATTENTION.search(event.key)
    ]
    return sorted(products, key=lambda product: -product.us)


def _result(
    options: argparse.Namespace, size: Size, stock: Side, tuned: Side, again: Side
) -> dict[str, Any]:
    sides = (stock, tuned, again)
    return {
        "model": options.model,
        "precision": options.precision,
        "mode": options.mode,
        "size": asdict(size),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else options.device,
        "torch": torch.__version__,
        "gemmsmith": gemmsmith.__version__,
        "winners": options.winners,
        "steps": options.steps,
        "tokens_per_second": {
            side.name: size.tokens / statistics.median(side.seconds) for side in sides
        },
        "speedup": _speedup(tuned, stock, again),
        "torch_over_itself": _speedup(again, stock),
        "seconds": {side.name: side.seconds for side in sides},
        "step_memory_bytes": {side.name: side.memory or None for side in sides},
        "product_us_per_step": {side.name: side.product_us for side in sides},
        "products": {side.name: [asdict(product) for product in side.products] for side in sides},
        "losses": {side.name: side.losses for side in sides},
        "largest_difference_of_losses": max(
            abs(a - b) for a, b in zip(stock.losses, tuned.losses, strict=True)
        ),
    }


def _speedup(side: Side, *stock: Side) -> dict[str, float]:
    """Return the speed-up over stock torch, or over the mean of its two models, by blocks."""
    seconds = (torch_side.seconds for torch_side in stock)
    means = [statistics.mean(block) for block in zip(*seconds, strict=True)]
    return asdict(paired(means, side.seconds))


def _print(result: dict[str, Any]) -> None:
    rates, speedup, noise = (
        result[key] for key in ("tokens_per_second", "speedup", "torch_over_itself")
    )
    lines = [
        f"{result['model']}, {result['precision']}, {result['mode']}, {result['device']}, "
        f"{result['steps']} steps",
        f"  torch      {rates['torch']:12.0f} tokens/s",
        f"  gemmsmith  {rates['gemmsmith']:12.0f} tokens/s, {speedup['median']:.3f} × "
        f"({speedup['ci_low']:.3f} … {speedup['ci_high']:.3f})",
        f"  torch again {rates['torch again']:11.0f} tokens/s, {noise['median']:.3f} × "
        f"({noise['ci_low']:.3f} … {noise['ci_high']:.3f})",
    ]
    if speedup["ci_low"] <= 1:
        lines.append("  not shown to be faster: leave this step to torch (see gemmsmith.compare)")
    products = result["product_us_per_step"]
    if products["torch"]:
        lines.append(
            f"  matrix products, a step: {products['torch'] / 1e3:.2f} ms and "
            f"{products['gemmsmith'] / 1e3:.2f} ms of GPU time"
        )
    memory = result["step_memory_bytes"]
    if memory["torch"]:
        lines.append(
            f"  memory of a step: {memory['torch'] / 1e9:.2f} GB and "
            f"{memory['gemmsmith'] / 1e9:.2f} GB"
        )
    lines.append(
        f"  losses end at {result['losses']['torch'][-1]:.4f} and "
        f"{result['losses']['gemmsmith'][-1]:.4f}; largest difference "
        f"{result['largest_difference_of_losses']:.4f}"
    )
    sys.stdout.write("\n".join(lines) + "\n")


def _draw(path: Path, stock: Side, tuned: Side, title: str) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    axes.plot(stock.losses, label="torch", linewidth=3, alpha=0.5)
    axes.plot(tuned.losses, label="gemmsmith", linewidth=1, color="black")
    axes.set(xlabel="step", ylabel="loss", title=title)
    axes.legend()
    figure.savefig(path)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=sorted(SIZES), default="gpt-350m")
    parser.add_argument("--precision", choices=("bf16", "fp8"), default="bf16")
    parser.add_argument("--mode", choices=("eager", "compiled", "graph"), default="eager")
    return parsed(parser)


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Add the options of all comparisons, and parse them."""
    parser.add_argument("--winners", help="a service's URL or a baked file (default: none)")
    parser.add_argument(
        "--steps", type=int, default=153, help="steps of each model, 3 of them to warm up"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=20261121)
    parser.add_argument("-o", "--output", help="where to write everything as JSON")
    parser.add_argument("--picture", help="where to draw the loss curves (needs matplotlib)")
    options = parser.parse_args()
    if options.steps < WARM_STEPS + BLOCK_STEPS:
        parser.error(f"--steps must be at least {WARM_STEPS + BLOCK_STEPS}")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
