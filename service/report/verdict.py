"""Winners in words for people: the gain over the default, and the choices of a candidate."""

from __future__ import annotations

from collections.abc import Mapping

from gemmsmith.answers.answer import Ratio
from gemmsmith.core.candidate import Candidate
from gemmsmith.core.config import Use
from gemmsmith.core.kernel import CutlassKernel, TileScheduler
from gemmsmith.core.launch import Decomposition
from gemmsmith.runtime import cublaslt

NONE = "–"

_TIMES = 2.0
"""From this ratio on, "2.1 times as fast" is easier to read than "110% faster"."""


def verdict(use: Use, speedup: Ratio | None, default: str) -> str:
    """Say how what is served compares: `12.3% faster`, `2.31 times as fast`, `cuBLAS stays`."""
    if use.is_default:
        return f"{default} stays"
    if speedup is None:
        return "not compared"
    return faster(speedup.median)


def why_cublas_stays(use: Use, speedup: Ratio | None, power_penalty: float | None) -> str:
    """Say why our kernel is not served although it was faster than cuBLAS; empty if it was not.

    `speedup` is that of the regime in which it gains least; it must exceed `power_penalty`.
    """
    if not use.is_default or speedup is None or speedup.ci_low <= 1.0:
        return ""
    if power_penalty is not None and power_penalty <= speedup.ci_low:
        return "is not reliably faster than cuBLAS's in every regime"
    least = f": it must be {power_penalty:.3f} × as fast" if power_penalty else ""
    return f"gains less than its higher power draw costs a program at the power limit{least}"


def other_libraries(algorithms: Mapping[int, int]) -> dict[int, int]:
    """Of numbers of algorithms by their version of cuBLASLt, those that cannot run here."""
    here = cublaslt.installed()
    return {} if here is None else {v: n for v, n in algorithms.items() if v != here}


def why(unusable: Mapping[int, int]) -> str:
    """Say why the algorithms of `other_libraries` cannot run here."""
    others = [f"{cublaslt.text(v)} ({number})" for v, number in sorted(unusable.items())]
    return (
        f"torch loads cuBLASLt {cublaslt.text(cublaslt.installed() or 0)}, not {', '.join(others)}"
    )


def faster(ratio: float) -> str:
    """Say a ratio of the default's time to ours in words: how much faster or slower ours is."""
    if ratio >= _TIMES:
        return f"{ratio:.2f} times as fast"
    share = f"{abs(ratio - 1):.1%}"
    if share == "0.0%":
        return "as fast"
    return f"{share} {'faster' if ratio > 1 else 'slower'}"


def choices(candidate: Candidate | None) -> tuple[str, ...]:
    """Return tile and cluster, schedule, scheduler and launch of a candidate as four texts."""
    if candidate is None:
        return (NONE,) * 4
    kernel, launch = candidate.kernel, candidate.launch
    if not isinstance(kernel, CutlassKernel):
        return (NONE, kernel.source, NONE, launch.key)
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
