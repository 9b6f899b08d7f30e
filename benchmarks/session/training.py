"""Training with winners: the products of examples/train_gpt.py are tuned, then both sides train.

Precision by precision: its products are tuned into a database of the step's own, the winners baked
into one file, and both models trained eagerly, compiled and in a CUDA graph. Every run leaves its
figures, and its loss curves as a picture, before the next one begins; the summary grows with them.
Winners of an earlier session that lie in .packs/ as train-winners-*.jsonl are not tuned again.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.session.core import CARRIED, CORES, SITE, Deadline, Session

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
"""Of one run: compiling a model twice is most of it."""

_NEEDED = {"bf16": "bf16", "fp8": "fp8_e4m3"}


def train(session: Session) -> int:
    """Twelve runs of examples/train_gpt.py with winners of its products: train-*.json."""
    deadline = Deadline(session)
    env = {"GEMMSMITH_DATABASE": session.database("train")}
    log = session.file("train", ".log")
    baked = session.file("train", ".gspack")
    found: dict[str, Any] = {"cores": CORES, "runs": []}
    known = sorted(str(path) for path in CARRIED.glob("train-winners-*.jsonl"))
    worst = session.gemmsmith("import", *known, log=log, env=env) if known else 0
    done: set[tuple[str, str]] = set()
    for precision in (p for p, dtype in _NEEDED.items() if dtype in session.dtypes):
        for dtype, suite in SUITES[precision]:
            if (dtype, suite) in done:
                continue
            done.add((dtype, suite))
            worst = max(worst, _tune(session, dtype, suite, deadline, env, log))
        code = session.gemmsmith("bake", "--winners", "-o", str(baked), log=log, env=env)
        worst = worst or code
        for model in session.models:
            for mode in MODES:
                if code or deadline.over():
                    break
                row = _run(session, model, precision, mode, baked)
                worst = worst or int(row["exit"])
                found["runs"].append(row)
                session.keep("train", found)
    if baked.exists() or session.dry_run:
        worst = worst or session.command(
            *(sys.executable, "-m", "benchmarks.host_cost", "--winners", str(baked)),
            *("-o", str(session.file("host-cost", ".json"))),
            log=log,
            env=session.only_device(),
        )
    return worst


def _tune(
    session: Session,
    dtype: str,
    suite: str,
    deadline: Deadline,
    env: Mapping[str, str],
    log: Path,
) -> int:
    code = session.gemmsmith(
        *("tune", "--suite", suite, "--dtype", dtype, "--device", session.device),
        *("--effort", session.effort, "--time-limit", deadline.left()),
        log=log,
        env=env,
    )
    winners = session.file("train-winners", ".jsonl", dtype)
    return code or session.gemmsmith("export", str(winners), "--dtype", dtype, log=log, env=env)


def _run(session: Session, model: str, precision: str, mode: str, baked: Path) -> dict[str, Any]:
    """One run; its row of the summary."""
    name = f"train-{model}-{precision}-{mode}"
    output = session.file(name, ".json")
    words = ["--model", model, "--precision", precision, "--mode", mode]
    words += ["--winners", str(baked), "-o", str(output)]
    if _draws():
        words += ["--picture", str(session.file(name, ".svg"))]
    code = session.command(
        *(sys.executable, "examples/train_gpt.py", *words),
        log=session.file("train", ".log"),
        env=session.only_device(),
        time_limit=RUN_LIMIT_S,
    )
    row: dict[str, Any] = {"model": model, "precision": precision, "mode": mode, "exit": code}
    return row | (summary(json.loads(output.read_text())) if code == 0 and output.exists() else {})


def summary(result: Mapping[str, Any]) -> dict[str, Any]:
    """What the table of a run needs: the curves stay in the run's own file."""
    return {
        "device": result["device"],
        "torch": result["torch"],
        "tokens_per_second": result["tokens_per_second"],
        "speedup": result["speedup"],
        "torch_over_itself": result["torch_over_itself"],
        "product_us_per_step": result["product_us_per_step"],
        "last_losses": {name: losses[-1] for name, losses in result["losses"].items()},
        "largest_difference_of_losses": result["largest_difference_of_losses"],
    }


def _draws() -> bool:
    """Whether pictures can be drawn: a GPU host need not have matplotlib."""
    return bool(importlib.util.find_spec("matplotlib")) or (SITE / "matplotlib").is_dir()
