"""What a comparison comes to, in words for people: how much faster what is served is, or that the
default stays.
"""

from __future__ import annotations

from gemmsmith.answers.answer import Ratio, Use

_TIMES = 2.0
"""From this ratio on, "2.1 times as fast" is easier to read than "110% faster"."""


def verdict(use: Use, speedup: Ratio | None, default: str) -> str:
    """`12.3% faster`, `2.31 times as fast`, or `cuBLAS stays`, of what callers are told to run."""
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
