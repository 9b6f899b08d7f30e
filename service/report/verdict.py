"""Winners in words for people: how much faster what is served is, and what was chosen."""

from __future__ import annotations

from gemmsmith.answers.answer import Ratio
from gemmsmith.core.candidate import Candidate
from gemmsmith.core.config import Use
from gemmsmith.core.kernel import CutlassKernel, TileScheduler
from gemmsmith.core.launch import Decomposition

NONE = "–"

_TIMES = 2.0
"""From this ratio on, "2.1 times as fast" is easier to read than "110% faster"."""


def verdict(use: Use, speedup: Ratio | None, default: str) -> str:
    """`12.3% faster`, `2.31 times as fast`, or `cuBLAS stays`, of what callers run."""
    if use.is_default:
        return f"{default} stays"
    if speedup is None:
        return "not compared"
    return faster(speedup.median)


def faster(ratio: float) -> str:
    """A ratio of times in words: how much faster, or slower, than what it was compared with."""
    if ratio >= _TIMES:
        return f"{ratio:.2f} times as fast"
    share = f"{abs(ratio - 1):.1%}"
    if share == "0.0%":
        return "as fast"
    return f"{share} {'faster' if ratio > 1 else 'slower'}"


def choices(candidate: Candidate | None) -> tuple[str, ...]:
    """Tile and cluster, schedule, scheduler, launch: what the winner is."""
    if candidate is None:
        return (NONE,) * 4
    kernel, launch = candidate.kernel, candidate.launch
    if not isinstance(kernel, CutlassKernel):
        return (NONE, kernel.backend.value, NONE, launch.key)
    swapped = " swapped" if kernel.swapped else ""
    words = [launch.raster.value, f"swizzle {launch.swizzle}"]
    if kernel.scheduler is TileScheduler.STREAM_K:
        words.append(launch.decomposition.value)
    if launch.splits > 1 or launch.decomposition is Decomposition.SPLIT_K:
        words.append(f"{launch.splits} splits")
    if launch.sm_budget:
        words.append(f"{launch.sm_budget} SMs")
    return (
        f"{'×'.join(map(str, kernel.tile))} · {'×'.join(map(str, kernel.cluster))}{swapped}",
        kernel.mainloop.value,
        kernel.scheduler.value,
        ", ".join(words),
    )
