"""Why cuBLAS is kept although a kernel was faster, as a clause for people."""

from __future__ import annotations

from gemmsmith.answers.answer import Ratio
from gemmsmith.core.config import Use


def why_cublas_stays(use: Use, speedup: Ratio | None, power_penalty: float | None) -> str:
    """Why our kernel is not served although it was faster than cuBLAS; empty if that is not so.

    `speedup` is of the regime in which it gains least; `power_penalty` is what it must exceed.
    """
    if not use.is_default or speedup is None or speedup.ci_low <= 1.0:
        return ""
    if power_penalty is not None and power_penalty <= speedup.ci_low:
        return "is not reliably faster than cuBLAS's in every regime"
    asked = f": it must be {power_penalty:.3f} × as fast" if power_penalty else ""
    return f"gains less than its higher power draw costs a program at the power limit{asked}"
