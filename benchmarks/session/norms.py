"""RMS norms, sums of columns, heads with their loss: alone and in steps of models."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain

from benchmarks.session.core import Session, gpus

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


def heads(session: Session) -> int:
    """Write heads-*.json: a head with its loss, with chunks of three sizes."""
    sizes = (str(mib * 2**20) for mib in (512, 1024, 4096))
    return session.command(
        *(sys.executable, "-m", "benchmarks.heads", "--chunk-bytes", *sizes),
        *("-o", str(session.file("heads", ".json"))),
        log=session.file("heads", ".log"),
        env=session.only_device(),
        time_limit=session.time_limit,
    )


def muon(session: Session) -> int:
    """Write muon-*.json: steps of Muon with the baked winners of symmetric products."""
    winners = session.file("winners", ".gspack", "bf16.symmetric")
    return session.command(
        *(sys.executable, "-m", "benchmarks.muon", "--winners", str(winners)),
        *("-o", str(session.file("muon", ".json"))),
        log=session.file("muon", ".log"),
        env=session.only_device(),
        time_limit=session.time_limit,
    )


def models(session: Session) -> int:
    """Write models-<n>.json for each visible GPU: steps with baked winners, in the chosen modes."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = len(visible.split(",")) if visible else max(gpus(), 1)
    winners = session.file("winners", ".gspack", "bf16")

    def work(ordinal: int) -> int:
        on = replace(session, device=f"cuda:{ordinal}")
        worst = 0
        for mode in ("eager", "compiled"):
            if mode not in session.modes:
                continue
            words = ["--compiled"] if mode == "compiled" else []
            code = session.command(
                *(sys.executable, "-m", "benchmarks.models", "--winners", str(winners), *words),
                *("--share", f"{ordinal}/{count}"),
                *("-o", str(session.out / f"models-{ordinal}.json")),
                log=session.out / f"models-{ordinal}.log",
                env=on.only_device(),
                time_limit=session.time_limit,
            )
            worst = worst or code
        return worst

    with ThreadPoolExecutor(count) as pool:
        return max(pool.map(work, range(count)))
