"""How long users wait for a winner, and whether tuning again gives the same one.

`cold`: nothing is compiled. `base`: the time of compiling ahead. `waiting`: new problems, with the
base compiled. `stability`: the same problem tuned several times.

Every measured command has its own pack store and database in the session's state, empty or with
links to the base's packs, so that no command uses results of another and all have the same kernels.
Kernels that it compiles are counted beside its seconds.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.session.core import CORES, ROOT, STATE, Deadline, Session

UNSEEN = "configs/suites/unseen.toml"
SUITE = "configs/suites/llm.toml"
SUITE_DTYPE = "fp8_e4m3"
RUNS = 10
"""How often `stability` tunes each of its problems."""

_FIELDS = ("m", "n", "k", "dtype", "layout")
Environment = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Target:
    """A problem to tune; as a string `4096x6144x4096 bf16 tn`."""

    m: int
    n: int
    k: int
    dtype: str
    layout: str = "tn"

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k} {self.dtype} {self.layout}"

    @property
    def words(self) -> tuple[str, ...]:
        """The problem as arguments of a command."""
        sizes = (str(self.m), str(self.n), str(self.k))
        return (*sizes, "--dtype", self.dtype, "--layout", self.layout)


COLD = (
    Target(m=4096, n=6144, k=4096, dtype="bf16"),
    Target(m=64, n=7168, k=2048, dtype="fp8_e4m3"),
    Target(m=512, n=3584, k=18944, dtype="fp16", layout="tt"),
)
STABLE = "configs/suites/stable.toml"


def cold(session: Session) -> int:
    """Tune problems, each with an empty database and no compiled kernels: cold-*.json."""
    deadline = Deadline(session)
    worst = 0
    measured: list[dict[str, Any]] = []
    for number, target in enumerate(_of(session, COLD)):
        if deadline.over():
            break
        env = place(session, f"cold-{number}")
        code, row, _ = _tune(session, target, env, session.file("cold", ".log"))
        worst = worst or code
        measured.append(row)
        session.keep("cold", {"cores": CORES, "problems": measured})
    return worst


def base(session: Session) -> int:
    """Compile the base into an empty pack store: base-*.json.

    At the time limit the compilers are stopped, and the packs built so far are counted. They are
    added to the session's pack store.
    """
    packs, normal = _base(session), STATE / "packs"
    if not session.dry_run:
        shutil.rmtree(packs, ignore_errors=True)
        packs.mkdir(parents=True)
    words = [word for dtype in session.dtypes for word in ("--dtype", dtype)]
    if session.limit is not None:
        words += ["--limit", str(session.limit)]
    began = time.monotonic()
    code, document = session.ask(
        *("compile", "--base", *words, "--packs", str(packs)),
        log=session.file("base", ".log"),
        time_limit=session.time_limit,
    )
    seconds = time.monotonic() - began
    if not session.dry_run:
        _link(packs, normal)
    figures = base_figures(document, seconds, CORES)
    print(json.dumps(figures), flush=True)
    session.keep("base", figures)
    return code


def base_figures(document: Any, seconds: float, cores: int) -> dict[str, Any]:
    """Return the figures of compiling the base in `seconds` on `cores`."""
    if document is None:
        return {"seconds": round(seconds, 1), "cores": cores}
    counts = document["counts"]
    return {
        "seconds": round(seconds, 1),
        "cores": cores,
        "kernels": counts["wanted"],
        "compiled": counts["compiled"],
        "failed": counts["failed"],
        "packs": counts["packs"],
        "bytes": document["bytes"],
        "kernels_per_core_minute": round(counts["compiled"] / cores / (seconds / 60), 2),
        "failures": document["failures"],
    }


def waiting(session: Session) -> int:
    """Tune a suite with compiled kernels, new problems in one process, and then one by one."""
    deadline = Deadline(session)
    log = session.file("waiting", ".log")
    result: dict[str, Any] = {"cores": CORES, "one_by_one": []}
    worst = 0
    lists: list[tuple[str, str, Sequence[str], tuple[str, ...]]] = []
    if SUITE_DTYPE in session.dtypes:
        lists.append(("suite", SUITE, (SUITE_DTYPE,), ("--compiled-only",)))
    lists.append(("together", UNSEEN, session.dtypes, ()))
    for name, suite, dtypes, options in lists:
        env = place(session, f"waiting-{name}", _compiled(session))
        code, result[name] = _tune_suite(session, suite, dtypes, options, deadline, env)
        worst = worst or code
        session.keep("waiting", result)
    for number, target in enumerate(_of(session, unseen())):
        if deadline.over():
            break
        env = place(session, f"waiting-{number}", _compiled(session))
        code, row, _ = _tune(session, target, env, log)
        worst = worst or code
        result["one_by_one"].append(row)
        session.keep("waiting", result)
    return worst


def stability(session: Session) -> int:
    """Tune a few problems several times, then compare their winners: stability-*.json."""
    deadline = Deadline(session)
    log = session.file("stability", ".log")
    winners = session.file("stability-winners", ".jsonl")
    packs = place(session, "stability", _compiled(session))["GEMMSMITH_PACKS"]
    runs: list[dict[str, Any]] = []
    lines: list[str] = []
    worst = 0
    dtypes = [word for dtype in session.dtypes for word in ("--dtype", dtype)]
    for run in range(RUNS):
        if deadline.over():
            break
        # The runs share a pack store, so a kernel beyond the base is compiled once.
        env = {**place(session, f"stability-{run}"), "GEMMSMITH_PACKS": packs}
        code, document = session.ask(
            *("tune", "--suite", STABLE, *dtypes, "--device", session.device),
            *("--effort", session.effort, "--again"),
            log=log,
            env=env,
        )
        worst = worst or code
        for outcome in (document or {}).get("outcomes", []):
            runs.append({"problem": problem_text(outcome["problem"]), **outcome_figures(outcome)})
            if outcome["result"] is not None:
                lines.append(json.dumps(outcome["result"]) + "\n")
        if not session.dry_run:
            winners.write_text("".join(lines))
        session.keep("stability-runs", runs)
    code = session.command(
        *(sys.executable, "-m", "benchmarks.session.stability", str(winners)),
        *("--device", session.device, "--packs", packs),
        *("-o", str(session.file("stability", ".json"))),
        log=log,
    )
    return worst or code


def unseen() -> Iterator[Target]:
    """Yield the problems of configs/suites/unseen.toml in every precision that supports them."""
    entries = tomllib.loads((ROOT / UNSEEN).read_text(encoding="utf-8"))["problem"]
    for entry in entries:
        layout = entry.get("layout", "tn")
        for dtype in ("bf16", "fp16", "fp8_e4m3"):
            if layout == "tn" or not dtype.startswith("fp8"):
                yield Target(m=entry["m"], n=entry["n"], k=entry["k"], dtype=dtype, layout=layout)


def _of(session: Session, problems: Iterable[Target]) -> list[Target]:
    return [target for target in problems if target.dtype in session.dtypes]


def _tune(
    session: Session, target: Target, env: Environment, log: Path
) -> tuple[int, dict[str, Any], Any]:
    """Tune a problem; return the exit status, a row of times, and the winner.

    `seconds` is the time of the whole command, `tuning` that of tuning alone, and `answered` that
    until the first winner.
    """
    before = count_kernels(env)
    began = time.monotonic()
    code, document = session.ask(
        *("tune", *target.words, "--device", session.device),
        *("--effort", session.effort, "--again"),
        log=log,
        env=env,
    )
    seconds = time.monotonic() - began
    row = {"problem": str(target), "seconds": round(seconds, 2), "exit": code}
    row |= {"compiled": count_kernels(env) - before, **outcome_figures(document)}
    print(json.dumps(row), flush=True)
    return code, row, (document or {}).get("result")


def _tune_suite(
    session: Session,
    suite: str,
    dtypes: Sequence[str],
    options: Sequence[str],
    deadline: Deadline,
    env: Environment,
) -> tuple[int, dict[str, Any]]:
    words = [word for dtype in dtypes for word in ("--dtype", dtype)]
    before = count_kernels(env)
    began = time.monotonic()
    code, document = session.ask(
        *("tune", "--suite", suite, *words, "--device", session.device),
        *("--effort", session.effort, "--again", "--time-limit", deadline.left(), *options),
        log=session.file("waiting", ".log"),
        env=env,
    )
    seconds = time.monotonic() - began
    outcomes = (document or {}).get("outcomes", [])
    row = {
        "suite": suite,
        "dtypes": list(dtypes),
        "seconds": round(seconds, 1),
        "exit": code,
        "compiled": count_kernels(env) - before,
        "totals": (document or {}).get("totals"),
    }
    print(json.dumps(row), flush=True)
    rows = [{"problem": problem_text(o["problem"]), **outcome_figures(o)} for o in outcomes]
    return code, row | {"problems": rows}


def outcome_figures(outcome: Any) -> dict[str, Any]:
    """Return the figures of an outcome that `gemmsmith tune --json` printed."""
    if outcome is None:
        return {"status": "no answer"}
    winner = outcome["result"] or {}
    candidate = winner.get("candidate") or {"kernel": {}}
    return {
        "status": outcome["status"],
        "tuning": outcome["seconds"],
        "answered": outcome["answered"],
        "use": winner.get("use"),
        "speedup": (winner.get("speedup") or {}).get("median"),
        "kernel": candidate["kernel"].get("name"),
        "error": outcome["error"],
    }


def problem_text(problem: Mapping[str, Any]) -> str:
    """Write a problem of a printed document as `Target` does."""
    batch = f" × {problem['batch']}" if problem["batch"] > 1 else ""
    return str(Target(**{name: problem[name] for name in _FIELDS})) + batch


def place(session: Session, name: str, packs: Path | None = None) -> dict[str, str]:
    """Return the environment of a command with a new database and a new pack store.

    The pack store is empty, or has the packs of the folder `packs`.
    """
    folder = STATE / f"measured-{session.tag}" / name
    if not session.dry_run:
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "packs").mkdir(parents=True)
        if packs is not None:
            _link(packs, folder / "packs")
    return {
        "GEMMSMITH_DATABASE": f"sqlite:///{folder / 'gemmsmith.db'}",
        "GEMMSMITH_PACKS": str(folder / "packs"),
    }


def _link(packs: Path, folder: Path) -> None:
    # Links are safe, because packs are replaced or removed, but never written to again.
    for path in sorted(packs.glob("*.*")):
        if path.suffix in (".so", ".json"):
            try:
                os.link(path, folder / path.name)
            except OSError:  # the file system has no links, or the file exists
                shutil.copy2(path, folder / path.name)


def count_kernels(env: Environment) -> int:
    """Count the kernels in a command's pack store; a kernel in two packs counts twice."""
    manifests = Path(env["GEMMSMITH_PACKS"]).glob("*.json")
    return sum(len(json.loads(path.read_bytes())["kernels"]) for path in manifests)


def _base(session: Session) -> Path:
    return STATE / f"base-packs-{session.tag}"


def _compiled(session: Session) -> Path:
    return _base(session) if _base(session).is_dir() else STATE / "packs"
