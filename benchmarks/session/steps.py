"""The steps of a session. Each returns an exit status, and writes results as it goes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

from benchmarks.session import carrying
from benchmarks.session.core import CARRIED, ROOT, SITE, STATE, Deadline, Session
from benchmarks.session.fleet import fleet
from benchmarks.session.invariance import invariance
from benchmarks.session.norms import heads, models, muon, norms
from benchmarks.session.profiling import profile
from benchmarks.session.programs import programs
from benchmarks.session.training import experts, train, train_fused, train_moe
from benchmarks.session.waiting import SUITE, base, cold, stability, waiting
from benchmarks.session.whole import whole

SWEEPS = "configs/suites/sweeps.toml"
PEERS_SUITE = "benchmarks/peers/problems.toml"
ADVICE_S, ADVICE_LAST_S = 200, 20
"""Seconds of `advice`, and of its last size."""


def test(session: Session) -> int:
    """Run tests/gpu or --tests, with a report."""
    report = {"GEMMSMITH_GPU_REPORT": str(session.file("gpu-tests", ".json"))}
    return _pytest(session, "gpu-tests", session.tests, session.only_device() | report)


def build_tests(session: Session) -> int:
    """Compile the kernels of tests/gpu or --tests, without running tests."""
    build = {"GEMMSMITH_GPU_TESTS": "build"}
    return _pytest(session, "build-tests", session.tests, session.only_device() | build)


def ranks(session: Session) -> int:
    report = {"GEMMSMITH_GPU_REPORT": str(session.file("ranks", ".json"))}
    return _pytest(session, "ranks", ("tests/gpu/test_ranks.py",), report)


def _pytest(session: Session, stem: str, files: Sequence[str], env: Mapping[str, str]) -> int:
    return session.pytest(*files, log=session.file(stem, ".log"), env=env)


def compile_kernels(session: Session) -> int:
    """Compile the kernels that the default effort may need for the suite, or --limit of each."""
    words = [word for dtype in session.dtypes for word in ("--dtype", dtype)]
    if session.limit is not None:
        words += ["--limit", str(session.limit)]
    suite = session.suite or SUITE
    return session.gemmsmith(
        "compile", "--suite", suite, *words, log=session.file("compile", ".log")
    )


def bake(session: Session) -> int:
    """Bake the shipped winners for `programs`; kernels that were not carried are compiled."""
    worst = 0
    for dtype in session.dtypes:
        code = session.gemmsmith(
            *("bake", "--winners", "--dtype", dtype),
            *("-o", str(session.file("winners", ".gspack", dtype))),
            log=session.file("bake", ".log", dtype),
        )
        worst = worst or code
    return worst


def tune(session: Session) -> int:
    """Tune the suite, one precision after the other, and export all winners after each.

    They are exported even if a signal ends the session during a precision.
    """
    deadline = Deadline(session)
    worst = 0
    for dtype in session.dtypes:
        worst = _tuned(session, deadline, session.suite or SUITE, dtype) or worst
    return worst


def missing(session: Session) -> int:
    """Tune what winners of another GPU ship for, and none of this one; export all winners."""
    suite = session.file("missing", ".toml")
    code = session.command(
        *(sys.executable, "-m", "benchmarks.missing", "-o", str(suite)),
        log=session.file("missing", ".log"),
        env=session.only_device(),
    )
    return code or _tuned(session, Deadline(session), str(suite), None)


def _tuned(session: Session, deadline: Deadline, suite: str, dtype: str | None) -> int:
    """Tune a suite in this element type, or all of its problems, and export all winners."""
    log = session.file("tune", ".log", dtype)
    try:
        return session.gemmsmith(
            *("tune", "--suite", suite, *(() if dtype is None else ("--dtype", dtype))),
            *("--device", session.device, "--time-limit", deadline.left()),
            *("--effort", session.effort, "--compiled-only", "--again"),
            log=log,
        )
    finally:
        session.gemmsmith("export", str(session.file("winners", ".jsonl", dtype)), log=log)


def record(session: Session) -> int:
    """Record exhaustive sweeps of a few varied problems."""
    worst = 0
    for dtype in session.dtypes:
        code = session.gemmsmith(
            *("record", "--suite", session.suite or SWEEPS, "--dtype", dtype),
            *("--device", session.device, "--compiled-only"),
            *("-o", str(session.file("sweep", ".jsonl.zst", dtype))),
            log=session.file("record", ".log", dtype),
        )
        worst = worst or code
    return worst


def peers(session: Session) -> int:
    """Measure all libraries on the same problems: peers-<dtype>.json, and a table in the log."""
    deadline = Deadline(session)
    worst = 0
    for dtype in session.dtypes:
        code = session.command(
            *(sys.executable, "-m", "benchmarks.peers", "--dtype", dtype),
            *("--suite", session.suite or PEERS_SUITE, "--device", session.device),
            *("--time-limit", deadline.left(), "--out", str(session.out)),
            log=session.file("peers", ".log", dtype),
        )
        worst = worst or code
    return worst


def ceilings(session: Session) -> int:
    """Measure the best rates of this GPU's memory and of cuBLAS: ceilings.json."""
    return session.gemmsmith(
        *("ceilings", "--device", session.device, "-o", str(session.out / "ceilings.json")),
        log=session.file("ceilings", ".log"),
    )


def alone(session: Session) -> int:
    """Measure the carried or the shipped winners and cuBLAS, each at its own clock."""
    carried = sorted(CARRIED.glob("*.jsonl")) or sorted((ROOT / "configs/winners").glob("*.jsonl"))
    return session.command(
        *(sys.executable, "-m", "benchmarks.alone", *map(str, carried)),
        *("--device", session.device, "-o", str(session.file("alone", ".json"))),
        log=session.file("alone", ".log"),
    )


def advice(session: Session) -> int:
    """Compare predicted padding with measured, in 200 s at most: advice-*.json."""
    seconds = min(ADVICE_S, session.time_limit)
    return session.command(
        *(sys.executable, "-m", "benchmarks.advice", "--device", session.device),
        *("--seconds", str(seconds - ADVICE_LAST_S), "-o", str(session.file("advice", ".json"))),
        log=session.file("advice", ".log"),
        time_limit=seconds,
    )


def report(session: Session) -> int:
    return session.gemmsmith(
        "report", "-o", str(session.out / "report"), log=session.file("report", ".log")
    )


def kernels(session: Session) -> int:
    """Build the file of the kernels that newcomers need, with all cores: gemmsmith-sm90.gskernels.

    What is compiled when --time-limit has passed stays in the pack store.
    """
    return session.gemmsmith(
        *("kernels", "build", "-o", str(session.out / "gemmsmith-sm90.gskernels")),
        *(() if session.limit is None else ("--limit", str(session.limit))),
        log=session.file("kernels", ".log"),
        env={"GEMMSMITH_WINNERS": str(ROOT / "configs/winners")},
        time_limit=session.time_limit,
    )


def packs(session: Session) -> int:
    """Write the pack store as parts of one archive that are small enough to be carried."""
    return 0 if session.dry_run else carrying.write(STATE / "packs", session.out, SITE)


STEPS: dict[str, Callable[[Session], int]] = {
    "test": test,
    "build_tests": build_tests,
    "ranks": ranks,
    "whole": whole,
    "cold": cold,
    "base": base,
    "waiting": waiting,
    "stability": stability,
    "bake": bake,
    "compile": compile_kernels,
    "tune": tune,
    "missing": missing,
    "record": record,
    "peers": peers,
    "ceilings": ceilings,
    "train": train,
    "train_moe": train_moe,
    "train_fused": train_fused,
    "experts": experts,
    "programs": programs,
    "fleet": fleet,
    "norms": norms,
    "heads": heads,
    "models": models,
    "muon": muon,
    "invariance": invariance,
    "alone": alone,
    "advice": advice,
    "report": report,
    "profile": profile,
    "kernels": kernels,
    "packs": packs,
}
