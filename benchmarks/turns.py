"""Times a step on several sides, in blocks that alternate as those of `gemmsmith.compare`."""

from __future__ import annotations

import gc
import itertools
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from gemmsmith.answers.answer import Ratio
from gemmsmith.files import publish
from gemmsmith.ops.comparing import paired

BLOCKS, BLOCK_S = 8, 0.5
"""Blocks of each side, and seconds of a block: three sides take 12 s."""

Side = Callable[[], AbstractContextManager[None]]
"""Returns the context in which the side's blocks run."""


def in_turns(
    step: Callable[[], object] | Mapping[str, Callable[[], object]],
    sides: Mapping[str, Side],
    *,
    device: str,
    tiny: bool = False,
) -> dict[str, list[float]]:
    """Return seconds of a step in each block of each side; sides may have steps of their own."""

    def timed(side: str, count: int) -> float:
        run = step[side] if isinstance(step, Mapping) else step
        with sides[side]():
            run()  # a patch looks at a model's layers, and chooses kernels
            settle(device)
            began = time.perf_counter()
            for _ in range(count):
                run()
            settle(device)
            return (time.perf_counter() - began) / count

    warm = max(timed(side, 2) for side in sides)
    count = 1 if tiny else min(20, max(1, round(BLOCK_S / warm)))
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    every = list(itertools.permutations(sides))
    # Of more orders than blocks, those far apart: in the first ones, the same side begins.
    orders = itertools.cycle(every[:: max(1, len(every) // BLOCKS)])
    for order in itertools.islice(orders, 2 if tiny else BLOCKS):
        for side in order:
            seconds[side].append(timed(side, count))
    return seconds


def compared(seconds: Mapping[str, Sequence[float]], ours: str) -> dict[str, Any]:
    """Summarise the result of `in_turns`: `torch` over `ours`, and `torch` over `again`."""
    return {
        **_ratio("gain", paired(seconds["torch"], seconds[ours])),
        **_ratio("torch_over_torch", paired(seconds["torch"], seconds["again"])),
        "ms": {side: round(1e3 * statistics.median(all_), 3) for side, all_ in seconds.items()},
    }


def _ratio(name: str, ratio: Ratio) -> dict[str, Any]:
    interval = [round(ratio.ci_low, 4), round(ratio.ci_high, 4)]
    return {name: round(ratio.median, 4), f"{name}_interval": interval}


def described(device: str) -> dict[str, Any]:
    """Return the beginning of a file of results: the device and versions."""
    return {
        "device": torch.cuda.get_device_name() if device != "cpu" else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def keep(result: dict[str, Any], part: str, row: dict[str, Any], output: Path) -> None:
    """Add a row to a part of the result, print it, and write the file, as a run may be cut off."""
    print(json.dumps(row), flush=True)
    result[part].append(row)
    publish(output, (json.dumps(result) + "\n").encode(), shared=True)


class Peak(NamedTuple):
    """Bytes allocated before a step, and at its peak; 0 on the CPU."""

    before: int
    most: int


def peak(step: Callable[[], object], device: str) -> Peak:
    """The memory of the second of two steps, above which cached memory does not count."""
    step()
    if device == "cpu":
        return Peak(0, 0)
    settle(device, forget=True)
    before = torch.cuda.memory_allocated()
    step()
    return Peak(before, torch.cuda.max_memory_allocated())


def settle(device: str, *, forget: bool = False) -> None:
    """Wait for the GPU; with `forget`, also free its cached memory and reset its peak."""
    if forget:
        gc.collect()
    if device == "cpu":
        return
    torch.cuda.synchronize()
    if forget:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
