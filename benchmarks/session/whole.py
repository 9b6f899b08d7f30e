"""All of tests/gpu on all GPUs of the host: first every kernel, then a worker for each GPU.

What is finished is kept in the state of the checkout, so that a second call on the same machine
goes on where the first one stopped.
"""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple

from benchmarks.session.core import CORES, ROOT, STATE, Deadline, Session, gpus

_FOLDER = STATE / "whole"
_TESTS = ROOT / "tests/gpu"
_KERNELS = "test_kernels"
_PARTS = ("then_d", "_gate and not then_d", "then_ and not then_d and not _gate", "not then_")
"""The tests of `test_kernels`, which would keep one GPU longest, in parts."""
_LONG = (
    "test_service",
    "test_models",
    "test_mixture",
    "test_isolation",
    "test_training",
    "test_sanitizer",
    "test_schedules",
    "test_measurement",
)
"""Files of half a minute and more. The others share processes: a start takes ten seconds."""
_ALL_GPUS = ("test_ranks", "test_unchanged", "test_fleet")


class Part(NamedTuple):
    """Tests of some files, by an expression of pytest's -k; empty: all of them."""

    name: str
    files: tuple[Path, ...]
    tests: str = ""

    @property
    def report(self) -> Path:
        return _FOLDER / f"{self.name}.json"


def whole(session: Session) -> int:
    """Run tests/gpu on all GPUs within --time-limit, and write one report: whole-*.json."""
    deadline, files = Deadline(session), sorted(_TESTS.glob("test_*.py"))
    if not session.dry_run:
        _FOLDER.mkdir(parents=True, exist_ok=True)
    _build(session, files, deadline)
    workers = range(max(gpus(), 1))
    kernels = (_TESTS / f"{_KERNELS}.py",)
    shared = [Part(name, (_TESTS / f"{name}.py",)) for name in _LONG]
    shared += [Part(f"{_KERNELS}-{i}", kernels, tests) for i, tests in enumerate(_PARTS)]
    short = [f for f in files if f.stem not in (_KERNELS, *_LONG, *_ALL_GPUS)]
    shared += [
        Part(f"short-{i}", tuple(short[i :: 2 * len(workers)])) for i in range(2 * len(workers))
    ]
    waiting: SimpleQueue[Part] = SimpleQueue()
    for part in shared:
        waiting.put(part)

    def work(gpu: int) -> None:
        only = replace(session, device=f"cuda:{gpu}").only_device()
        while True:
            try:
                _run(session, waiting.get_nowait(), only, deadline)
            except Empty:
                return

    with ThreadPoolExecutor(len(workers)) as pool:
        list(pool.map(work, workers))
    together = Part("all-gpus", tuple(f for f in files if f.stem in _ALL_GPUS))
    _run(session, together, {}, deadline)
    return 0 if session.dry_run else _written(session, [*shared, together])


def _build(session: Session, files: list[Path], deadline: Deadline) -> None:
    built = _FOLDER / "built"
    if built.exists():
        return
    # Compilers wait for memory and for each other's files: a quarter more than there are cores.
    env = {"GEMMSMITH_GPU_TESTS": "build", "GEMMSMITH_COMPILE_JOBS": str(CORES * 5 // 4)}
    status = _pytest(session, Part("build", tuple(files)), env, deadline)
    if not session.dry_run and not status:
        built.touch()


def _run(session: Session, part: Part, devices: dict[str, str], deadline: Deadline) -> None:
    if part.report.exists() or (deadline.over() and not session.dry_run):
        return
    # A report without an exit status is of a part that was cut off: it runs again.
    report = part.report.with_suffix(".part")
    began = time.monotonic()
    _pytest(session, part, {"GEMMSMITH_GPU_REPORT": str(report), **devices}, deadline)
    if report.exists() and json.loads(report.read_text())["exit_status"] is not None:
        report.rename(part.report)
    print(f"{part.name}: {time.monotonic() - began:.0f} s", flush=True)


def _pytest(session: Session, part: Part, env: dict[str, str], deadline: Deadline) -> int:
    files = [str(file.relative_to(ROOT)) for file in part.files]
    words = ("-k", part.tests) if part.tests else ()
    log = session.file(f"whole-{part.name}", ".log")
    # Several run at once: their output goes to their logs alone.
    with (Path(os.devnull) if session.dry_run else log).open("ab") as output:
        return session.pytest(
            *files, *words, log=log, env=env, stdout=output, time_limit=float(deadline.left())
        )


def _written(session: Session, parts: list[Part]) -> int:
    """Write the report; the status is 1 if a part failed, or did not run."""
    reports = {
        part.name: json.loads(part.report.read_text()) for part in parts if part.report.exists()
    }
    missing = [part.name for part in parts if part.name not in reports]
    counts = {
        outcome: sum(report[outcome] for report in reports.values())
        for outcome in ("passed", "failed", "skipped")
    }
    print(f"{counts}, not run: {', '.join(missing) or 'none'}", flush=True)
    for report in reports.values():
        for test in report["tests"]:
            if test["outcome"] == "failed":
                print(f"{test['test']}: {test.get('message', '')}", flush=True)
    document = {"counts": counts, "not_run": missing, "parts": reports}
    session.file("whole", ".json").write_text(json.dumps(document, indent=1))
    return int(bool(missing) or any(report["exit_status"] for report in reports.values()))
