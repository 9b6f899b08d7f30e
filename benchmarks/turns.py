"""A step with and without something, in blocks that take turns as those of `gemmsmith.compare`."""

from __future__ import annotations

import gc
import itertools
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import transformers

from gemmsmith.answers.answer import Ratio
from gemmsmith.files import publish
from gemmsmith.ops.models.comparing import paired

BLOCKS, BLOCK_S = 8, 0.5
"""Of each side: 12 s for three."""

Side = Callable[[], AbstractContextManager[None]]
"""Opens what is in force on that side."""


def in_turns(
    step: Callable[[], object] | Mapping[str, Callable[[], object]],
    sides: Mapping[str, Side],
    *,
    device: str,
    tiny: bool = False,
) -> dict[str, list[float]]:
    """Seconds of a step on each side, block by block; a side may have a step of its own."""

    def timed(side: str, count: int) -> float:
        run = step[side] if isinstance(step, Mapping) else step
        with sides[side]():
            settle(device)
            began = time.perf_counter()
            for _ in range(count):
                run()
            settle(device)
            return (time.perf_counter() - began) / count

    warm = max(timed(side, 2) for side in sides)
    count = 1 if tiny else min(20, max(1, round(BLOCK_S / warm)))
    found: dict[str, list[float]] = {side: [] for side in sides}
    orders = itertools.cycle(itertools.permutations(sides))
    for order in itertools.islice(orders, 2 if tiny else BLOCKS):
        for side in order:
            found[side].append(timed(side, count))
    return found


def compared(seconds: Mapping[str, Sequence[float]], ours: str) -> dict[str, Any]:
    """What `in_turns` found, as a result has it: `torch` beside `ours`, and beside `again`."""
    return {
        **_ratio("gain", paired(seconds["torch"], seconds[ours])),
        **_ratio("torch_over_torch", paired(seconds["torch"], seconds["again"])),
        "ms": {side: round(1e3 * statistics.median(all_), 3) for side, all_ in seconds.items()},
    }


def _ratio(name: str, found: Ratio) -> dict[str, Any]:
    interval = [round(found.ci_low, 4), round(found.ci_high, 4)]
    return {name: round(found.median, 4), f"{name}_interval": interval}


def described(device: str) -> dict[str, Any]:
    """What a file of results begins with."""
    return {
        "device": torch.cuda.get_device_name() if device != "cpu" else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def keep(found: dict[str, Any], part: str, row: dict[str, Any], output: Path) -> None:
    """Print a further row of a part, and write all that was found: a run may be cut off."""
    print(json.dumps(row), flush=True)
    found[part].append(row)
    publish(output, (json.dumps(found) + "\n").encode(), shared=True)


def settle(device: str, *, forget: bool = False) -> None:
    """Wait for the GPU; or have its memory as in the beginning."""
    if forget:
        gc.collect()
    if device == "cpu":
        return
    torch.cuda.synchronize()
    if forget:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
