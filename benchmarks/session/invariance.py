"""One order of sums: its winners, that they keep the bits, and what it costs.

The suite is tuned with a short list of kernels. What is done is kept in the state of the checkout,
so that a second call on the same machine goes on where the first one stopped: tuned problems are
not tuned again, and a part that has succeeded is not run again.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.session.core import CARRIED, ROOT, STATE, Deadline, Session, gpus

SUITE = "configs/suites/invariant.toml"
SHIPPED = ROOT / "configs/winners"
KERNELS = {
    "bf16": ("bf16", "bf16.then_silu_gate_aux", "bf16.then_dsilu_gate", "bf16.group_rows"),
    "fp8_e4m3": ("fp8_e4m3.scale_row",),
}
"""Types of the kernels that each element type of the session needs."""
ORDERED = {"bf16": "bf16.sum_sequential", "fp8_e4m3": "fp8_e4m3.scale_row.sum_sequential"}
"""Operations that are tuned."""
TUNE_S, PART_S = 330.0, 200.0
"""Time limits: of tuning, and of each other part."""
BATCHES = (1, 64)
"""Sequences in the batches whose logits are compared."""


@dataclass(frozen=True, kw_only=True)
class _Run:
    """A call of the step for one element type.

    Attributes:
        env: the session's GPU, a database of these winners only, and their packs.
        folder: what is kept on this machine.
    """

    session: Session
    dtype: str
    env: Mapping[str, str]
    folder: Path
    deadline: Deadline

    @property
    def log(self) -> Path:
        return self.session.file("invariance", ".log", self.dtype)

    def limit(self, seconds: float) -> float:
        return min(seconds, float(self.deadline.left()))

    def bundle(self, name: str) -> Path:
        return self.folder / f"{name}.gspack"

    def python(self, module: str, *words: str, env: Mapping[str, str] | None = None) -> int:
        return self.session.command(
            *(sys.executable, "-m", f"benchmarks.invariance.{module}", *words),
            log=self.log,
            env={**self.env, **(env or {})},
            time_limit=self.limit(PART_S),
        )

    def part(
        self, name: str, module: str, *words: str, env: Mapping[str, str] | None = None
    ) -> int:
        """Run a part that writes a file of results, unless it has succeeded here before."""
        kept, output = self.folder / f"{name}.json", self.session.file(name, ".json", self.dtype)
        if kept.exists():
            shutil.copy2(kept, output)
            return 0
        if self.deadline.over() and not self.session.dry_run:
            return 1
        code = self.python(module, *words, "-o", str(output), env=env)
        if code == 0 and output.exists():
            shutil.copy2(output, kept)
        return code


def invariance(session: Session) -> int:
    """Tune the suite, compare bits, and measure the cost: see the script's help."""
    worst, deadline = 0, Deadline(session)
    for dtype in (name for name in session.dtypes if name in KERNELS):
        folder = STATE / f"invariance-{session.tag.partition('-')[0]}-{dtype}"
        if not session.dry_run:
            folder.mkdir(parents=True, exist_ok=True)
        env = {**session.only_device(), "GEMMSMITH_DATABASE": f"sqlite:///{folder}/gemmsmith.db"}
        run = _Run(session=session, dtype=dtype, env=env, folder=folder, deadline=deadline)
        worst = max(worst, _winners(run))
        worst = max(worst, _measured(run))
    return worst


def _winners(run: _Run) -> int:
    """Compile what is not carried, tune what is not tuned, and write the winners to two files."""
    session, worst = run.session, 0
    for kind in KERNELS[run.dtype]:
        worst = max(worst, run.python("kernels", "--dtype", kind, "--compile"))
    known = sorted(str(path) for path in CARRIED.glob(f"*{ORDERED[run.dtype]}*.jsonl"))
    if known:
        worst = max(worst, session.gemmsmith("import", *known, log=run.log, env=run.env))
    try:
        code = session.gemmsmith(
            *("tune", "--suite", SUITE, "--dtype", ORDERED[run.dtype], "--device", "cuda:0"),
            *("--effort", session.effort, "--compiled-only"),
            *("--time-limit", str(int(run.limit(TUNE_S)))),
            log=run.log,
            env=run.env,
        )
        worst = max(worst, code)
    finally:
        winners = session.file("winners", ".jsonl", ORDERED[run.dtype])
        session.gemmsmith("export", str(winners), log=run.log, env=run.env)
    code = session.gemmsmith(
        "bake", "--winners", "-o", str(run.bundle("invariant")), log=run.log, env=run.env
    )
    if run.dtype == "bf16":
        plain = {**run.env, "GEMMSMITH_DATABASE": f"sqlite:///{run.folder}/plain.db"}
        files = (*SHIPPED.glob("*.bf16.jsonl"), *SHIPPED.glob("*.bf16.fused.jsonl"))
        shipped = sorted(map(str, files))
        session.gemmsmith("import", *shipped, log=run.log, env=plain)
        session.gemmsmith(
            *("bake", "--suite", SUITE, "--dtype", "bf16", "-o", str(run.bundle("plain"))),
            log=run.log,
            env=plain,
        )
    return max(worst, code)


def _measured(run: _Run) -> int:
    """Run all parts, those that prove the bits first."""
    winners = ("--winners", str(run.bundle("invariant")))
    if run.dtype != "bf16":
        return run.part("invariance-bits", "comparisons", *winners, "--fp8")
    plain = ("--plain", str(run.bundle("plain")))
    seconds = ("--seconds", str(PART_S - 20))
    without = {"CUBLAS_WORKSPACE_CONFIG": ":0:0"}
    return max(
        run.part("invariance-bits", "comparisons", *winners),
        _logits(run, winners),
        run.part("invariance-steps", "steps", *winners, *plain),
        run.part("invariance-cost", "cost", *winners, *seconds),
        run.part(
            *("invariance-cost-without-workspace", "cost", *winners, *seconds, "--without-triton"),
            env=without,
        ),
    )


def _logits(run: _Run, winners: Sequence[str]) -> int:
    """Compute logits in a process for each batch, at once if there are two GPUs, and compare."""
    names = [f"invariance-logits-{rows}" for rows in BATCHES]

    def compute(place: int) -> int:
        gpu = replace(run.session, device=f"cuda:{place}") if gpus() > 1 else run.session
        rows = ("--rows", str(BATCHES[place]))
        return run.part(names[place], "logits", *winners, *rows, env=gpu.only_device())

    with ThreadPoolExecutor(min(max(gpus(), 1), len(BATCHES))) as pool:
        worst = max(pool.map(compute, range(len(BATCHES))))
    files = [str(run.session.file(name, ".json", run.dtype)) for name in names]
    return worst or run.python("logits", "--same", *files)
