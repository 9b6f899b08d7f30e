"""The steps of a session. Each returns an exit status, and writes results as it goes."""

from __future__ import annotations

import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence

from benchmarks.session.core import CARRIED, ROOT, STATE, Deadline, Session
from benchmarks.session.fleet import fleet
from benchmarks.session.invariance import invariance
from benchmarks.session.norms import norms
from benchmarks.session.profiling import profile
from benchmarks.session.programs import programs
from benchmarks.session.training import experts, train, train_fused, train_moe
from benchmarks.session.waiting import SUITE, base, cold, stability, waiting
from benchmarks.session.whole import whole

SWEEPS = "configs/suites/sweeps.toml"
PEERS_SUITE = "benchmarks/peers/problems.toml"
ADVICE_S, ADVICE_LAST_S = 200, 20
"""Seconds of `advice`, and of its last size."""
ARCHIVE_BYTES = 40 * 2**20
"""Packs in an archive; compressed they take a third of that."""


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
        log = session.file("tune", ".log", dtype)
        try:
            code = session.gemmsmith(
                *("tune", "--suite", session.suite or SUITE, "--dtype", dtype),
                *("--device", session.device, "--time-limit", deadline.left()),
                *("--effort", session.effort, "--compiled-only", "--again"),
                log=log,
            )
            worst = worst or code
        finally:
            winners = session.file("winners", ".jsonl", dtype)
            session.gemmsmith("export", str(winners), log=log)
    return worst


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


def packs(session: Session) -> int:
    """Write the pack store as archives that are small enough to be carried."""
    if session.dry_run:
        return 0
    total, number, tar = ARCHIVE_BYTES + 1, 0, None
    for manifest in sorted((STATE / "packs").glob("*.json")):
        pack = manifest.with_suffix(".so")
        size = manifest.stat().st_size + pack.stat().st_size
        if total + size > ARCHIVE_BYTES:
            if tar is not None:
                tar.close()
            number, total = number + 1, 0
            tar = tarfile.open(session.out / f"packs-{number}.tar.gz", "w:gz")  # noqa: SIM115
        assert tar is not None
        for path in (pack, manifest):
            tar.add(path, arcname=path.name)
        total += size
    if tar is not None:
        tar.close()
    print(f"{number} archives", flush=True)
    return 0


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
    "invariance": invariance,
    "alone": alone,
    "advice": advice,
    "report": report,
    "profile": profile,
    "packs": packs,
}
