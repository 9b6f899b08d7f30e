"""What power had to do with an answer, in a clause for people."""

from __future__ import annotations

from gemmsmith.answer import Ratio, Use

NEGLIGIBLE = 1.005
"""A power penalty below this is as good as none."""


def why_cublas_stays(use: Use, speedup: Ratio | None, power_penalty: float | None) -> str:
    """What our kernel does, where cuBLAS is the answer although it was faster; else empty.

    `speedup` is of the regime in which it gains least, `power_penalty` what was asked of it.
    """
    if not use.is_default or speedup is None or speedup.ci_low <= 1.0:
        return ""
    if power_penalty is not None and power_penalty <= speedup.ci_low:
        return "is not surely ahead of cuBLAS's in every state of the GPU"
    asked = f": it must be {power_penalty:.3f} × as fast" if power_penalty else ""
    return f"draws more power than its gain is worth to a program at the power limit{asked}"


def power_paid(use: Use, power_penalty: float | None) -> str:
    """What a winner's power costs, where it is worth a word; else empty."""
    if use.is_default or power_penalty is None or power_penalty < NEGLIGIBLE:
        return ""
    return f"its power costs {power_penalty:.3f}; between the GPU's states it gains more"
