"""RMS norms by torch's fused kernel: what steps of models gain, each size alone, and sums."""

from __future__ import annotations

import sys
from itertools import chain

from benchmarks.session.core import Session

MODELS = {"llama": "llama", "qwen3": "qwen3", "qwen3-moe": "qwen3-moe", "decode-16": "decode"}
"""Of this session's models those that are measured, as benchmarks/norms.py calls them."""


def norms(session: Session) -> int:
    """norms-*.json; cut off, it has what was measured until then."""
    asked = [("--model", ours) for name, ours in MODELS.items() if name in session.models]
    words = chain.from_iterable(asked or [("--only", "kernels"), ("--only", "sums")])
    return session.command(
        *(sys.executable, "-m", "benchmarks.norms"),
        *words,
        *("-o", str(session.file("norms", ".json"))),
        log=session.file("norms", ".log"),
        env=session.only_device(),
        time_limit=session.time_limit,
    )
