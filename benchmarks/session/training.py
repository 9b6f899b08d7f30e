"""Training with winners: the products of the examples are tuned, then both sides train.

For examples/train_gpt.py, precision by precision: its products are tuned into a database of the
step, the winners are baked into one file, and both models are trained eagerly, compiled and in a
CUDA graph. Problems with winners of an earlier session, in .packs/train-winners-*.jsonl, are not
tuned again. The mixtures of experts and the fused MLPs, in bf16, use the winners in .packs/*.jsonl,
or the shipped ones.

Every run writes its figures and a picture of its loss curves before the next one begins; the
summary grows with them.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.session.core import CARRIED, CORES, ROOT, SITE, Deadline, Session

SUITES = {
    "bf16": (("bf16", "configs/suites/train_gpt.toml"),),
    # The head stays bf16; gradients are E5M2.
    "fp8": (
        ("bf16", "configs/suites/train_gpt_head.toml"),
        ("fp8_e4m3", "configs/suites/train_gpt.toml"),
        ("fp8_e5m2", "configs/suites/train_gpt_fp8.toml"),
    ),
}
"""Element types and suites of each precision of the example."""

MODELS = ("gpt-350m", "llama-8b-blocks")
MODES = ("eager", "compiled", "graph")
RUN_LIMIT_S = 600.0
"""Time limit of a run; most of it is compiling a model twice."""

MOE_SUITE = "configs/suites/train_moe.toml"
MOE_RUNS: Mapping[str, tuple[str, ...]] = {
    "qwen3-2048": ("train_qwen3_moe.py", "--tokens", "2048", "--steps", "63"),
    # Eight times the tokens: fewer steps take a minute.
    "qwen3-16384": ("train_qwen3_moe.py", "--tokens", "16384", "--steps", "43"),
    "qwen3-2048-experts": (
        *("train_qwen3_moe.py", "--tokens", "2048", "--steps", "63", "--experts", "gemmsmith"),
    ),
    "qwen3-16384-experts": (
        *("train_qwen3_moe.py", "--tokens", "16384", "--steps", "43", "--experts", "gemmsmith"),
    ),
    "moe-1b": ("train_moe.py", "--steps", "63"),
}
"""Script and options of each run, the most important first."""

SHIPPED = ROOT / "configs/winners"
FUSED_SUITE = "configs/suites/train_fused.toml"
_LLAMA = ("train_llama.py", "--layers", "12", "--steps", "43")
FUSED_RUNS: Mapping[str, tuple[str, ...]] = {
    # 12 of their 32 or 36 layers fit into memory beside two more models.
    "llama-3-8b": (*_LLAMA, "--model", "llama-3-8b"),
    "gpt-350m": ("train_gpt.py", "--model", "gpt-350m", "--steps", "63"),
    "llama-8b-blocks": ("train_gpt.py", "--model", "llama-8b-blocks", "--steps", "63"),
    "qwen3-8b": (*_LLAMA, "--model", "qwen3-8b"),
}
"""Script and options of each run, the most important first."""

RUNS = (*dict.fromkeys((*MODELS, *MOE_RUNS, *FUSED_RUNS)),)
"""Every model that some step trains."""

_COMPILED = {"train_gpt.py": ("--mode", "compiled")}
"""Options for compiling of scripts that have no `--compile`."""
_NEEDED = {"bf16": "bf16", "fp8": "fp8_e4m3"}


def train(session: Session) -> int:
    """Make twelve runs of examples/train_gpt.py with winners of its products: train-*.json."""
    deadline = Deadline(session)
    env = {"GEMMSMITH_DATABASE": session.database("train")}
    log = session.file("train", ".log")
    baked = session.file("train", ".gspack")
    result: dict[str, Any] = {"cores": CORES, "runs": []}
    known = sorted(str(path) for path in CARRIED.glob("train-winners-*.jsonl"))
    worst = session.gemmsmith("import", *known, log=log, env=env) if known else 0
    done: set[tuple[str, str]] = set()
    for precision in (p for p, dtype in _NEEDED.items() if dtype in session.dtypes):
        for dtype, suite in SUITES[precision]:
            if (dtype, suite) in done:
                continue
            done.add((dtype, suite))
            worst = max(worst, _tune(session, dtype, suite, deadline.left(), env, log))
        code = session.gemmsmith("bake", "--winners", "-o", str(baked), log=log, env=env)
        worst = worst or code
        for model in (name for name in MODELS if name in session.models):
            for mode in session.modes:
                if code or deadline.over():
                    break
                row = _run(session, model, precision, mode, baked)
                worst = worst or int(row["exit"])
                result["runs"].append(row)
                session.keep("train", result)
    if baked.exists() or session.dry_run:
        worst = worst or session.command(
            *(sys.executable, "-m", "benchmarks.host_cost", "--winners", str(baked)),
            *("-o", str(session.file("host-cost", ".json"))),
            log=log,
            env=session.only_device(),
        )
    return worst


def train_moe(session: Session) -> int:
    """Make ten runs of the mixtures of experts with winners of their products: train-moe-*.json."""
    return _trained(session, "train-moe", MOE_SUITE, MOE_RUNS)


def train_fused(session: Session) -> int:
    """Make eight runs with winners of MLPs with both passes fused: train-fused-*.json."""
    return _trained(session, "train-fused", FUSED_SUITE, FUSED_RUNS)


def experts(session: Session) -> int:
    """Measure a layer of experts, with the winners of `train_moe`: experts-*.json."""
    code, baked = _baked(session, "experts", MOE_SUITE)
    return code or session.command(
        *(sys.executable, "-m", "benchmarks.experts", "--winners", str(baked)),
        *("-o", str(session.file("experts", ".json"))),
        log=session.file("experts", ".log"),
        env=session.only_device(),
        time_limit=session.time_limit,
    )


def _trained(
    session: Session,
    stem: str,
    suite: str,
    runs: Mapping[str, tuple[str, ...]],
) -> int:
    """Make the runs in bf16, eager and then compiled, with winners of a suite."""
    if "bf16" not in session.dtypes:
        return 0
    deadline = Deadline(session)
    code, baked = _baked(session, stem, suite)
    log, worst = session.file(stem, ".log"), code
    result: dict[str, Any] = {"cores": CORES, "runs": []}
    for mode in (name for name in ("eager", "compiled") if name in session.modes):
        for model, (script, *words) in runs.items():
            if code or deadline.over():
                break
            if model not in session.models:
                continue
            if mode == "compiled":
                words += _COMPILED.get(script, ("--compile",))
            name, limit = f"{stem}-{model}-{mode}", min(RUN_LIMIT_S, float(deadline.left()))
            row = _compared(session, name, (script, *words), baked, log, limit)
            worst = worst or int(row["exit"])
            result["runs"].append({"model": model, "mode": mode, **row})
            session.keep(stem, result)
    return worst


def _baked(session: Session, stem: str, suite: str) -> tuple[int, Path]:
    """Bake a suite's winners in bf16, carried or shipped; return the worst status and the file."""
    known = sorted(CARRIED.glob("*.jsonl")) or sorted(SHIPPED.glob("*.bf16*.jsonl"))
    env = {"GEMMSMITH_DATABASE": session.database(stem)}
    log, baked = session.file(stem, ".log"), session.file(stem, ".gspack")
    worst = session.gemmsmith("import", *map(str, known), log=log, env=env)
    code = session.gemmsmith(
        *("bake", "--suite", suite, "--dtype", "bf16", "-o", str(baked)), log=log, env=env
    )
    return worst or code, baked


def _tune(
    session: Session,
    dtype: str,
    suite: str,
    time_limit: str,
    env: Mapping[str, str],
    log: Path,
) -> int:
    """Tune problems without a winner of this software, and export all winners of the dtype."""
    code = session.gemmsmith(
        *("tune", "--suite", suite, "--dtype", dtype, "--device", session.device),
        *("--effort", session.effort, "--time-limit", time_limit),
        log=log,
        env=env,
    )
    winners = session.file("train-winners", ".jsonl", dtype)
    exported = session.gemmsmith("export", str(winners), "--dtype", dtype, log=log, env=env)
    return code or exported


def _run(session: Session, model: str, precision: str, mode: str, baked: Path) -> dict[str, Any]:
    """Run train_gpt.py, and return its row of the summary."""
    name, log = f"train-{model}-{precision}-{mode}", session.file("train", ".log")
    words = ("train_gpt.py", "--model", model, "--precision", precision, "--mode", mode)
    row = _compared(session, name, words, baked, log, RUN_LIMIT_S)
    return {"model": model, "precision": precision, "mode": mode, **row}


def _compared(
    session: Session,
    name: str,
    words: Sequence[str],
    baked: Path,
    log: Path,
    time_limit: float,
) -> dict[str, Any]:
    """Run an example, a script and its options; return its exit status and its figures."""
    output = session.file(name, ".json")
    script, *options = words
    options += ["--winners", str(baked), "-o", str(output)]
    if _draws():
        options += ["--picture", str(session.file(name, ".svg"))]
    code = session.command(
        *(sys.executable, f"examples/{script}", *options),
        log=log,
        env=session.only_device(),
        time_limit=time_limit,
    )
    row: dict[str, Any] = {"exit": code}
    return row | (summary(json.loads(output.read_text())) if code == 0 and output.exists() else {})


def summary(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a run for the summary; the curves stay in the run's own file."""
    return {
        "device": result["device"],
        "torch": result["torch"],
        "tokens_per_second": result["tokens_per_second"],
        "speedup": result["speedup"],
        "step_memory_bytes": result["step_memory_bytes"],
        "torch_over_itself": result["torch_over_itself"],
        "product_us_per_step": result["product_us_per_step"],
        "last_losses": {name: losses[-1] for name, losses in result["losses"].items()},
        "largest_difference_of_losses": result["largest_difference_of_losses"],
    }


def _draws() -> bool:
    return bool(importlib.util.find_spec("matplotlib")) or (SITE / "matplotlib").is_dir()
