"""RMS norms by torch's fused kernel: in steps of models, and alone; and sums of columns."""

from __future__ import annotations

import sys
from itertools import chain

from benchmarks.session.core import Session

MODELS = {"llama": "llama", "qwen3": "qwen3", "qwen3-moe": "qwen3-moe", "decode-16": "decode"}
"""The measured models: the session's names, and those of benchmarks/norms.py."""


def norms(session: Session) -> int:
    """Write norms-*.json, which grows with each row."""
    models = [("--model", model) for name, model in MODELS.items() if name in session.models]
    words = chain.from_iterable(models or [("--only", "kernels"), ("--only", "sums")])
    return session.command(
        *(sys.executable, "-m", "benchmarks.norms"),
        *words,
        *("-o", str(session.file("norms", ".json"))),
        log=session.file("norms", ".log"),
        env=session.only_device(),
        time_limit=session.time_limit,
    )
