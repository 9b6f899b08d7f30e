"""How much faster a fleet of two GPUs tunes a suite than a fleet of one, with Ray on this host.

Each fleet has its own database and pack store, and the same share of the host's cores as of its
GPUs. It tunes the suite twice: first with nothing compiled, then with the kernels of the first
time. The smaller fleet comes first; the other cores are free meanwhile.

Problems are measured on any free GPU. So the fleets' winners also show how much two GPUs of a model
differ: they have each GPU's UUID. On a host without GPUs, recorded ones are used to try the step.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.session.core import CORES, ROOT, Session, gpus
from benchmarks.session.waiting import SUITE, count_kernels, outcome_figures, place, problem_text

PORT = 6399
"""Port of Ray's head; not the default, which another cluster may use."""

READY_WITHIN_S = 90.0
STAGE_S = 260.0
"""Time limit of a suite; jobs that are left are cancelled."""

RAY = ("-m", "ray.scripts.scripts")
RECORDED = {"replay:nvidia-h200-132sm": 2}


def fleet(session: Session) -> int:
    """Tune with one GPU, then with all: fleet-*.json, and the winners of each fleet."""
    present = gpus() or sum(RECORDED.values())
    worst, rows = 0, []
    for number in sorted({1, present}):
        cores = max(1, CORES * number // present)
        row: dict[str, Any] = {"gpus": number, "cores": cores}
        rows.append(row)
        env = place(session, f"fleet-{number}") | {"RAY_USAGE_STATS_ENABLED": "0"}
        log = session.file(f"fleet-{number}", ".log")
        session.gemmsmith("db", "upgrade", log=log, env=env)
        shipped = sorted(str(path) for path in (ROOT / "configs" / "winners").glob("*.jsonl"))
        session.gemmsmith("import", *shipped, log=log, env=env)
        with (
            _cluster(session, number, cores, env, log),
            _driver(session, number, env) as started,
        ):
            row["ready_s"] = started
            for stage in ("cold", "warm"):
                code, row[stage] = _tuned(session, env, log)
                worst = worst or code
                session.keep("fleet", rows)
        winners = str(session.file(f"winners-fleet-{number}", ".jsonl"))
        session.gemmsmith("export", winners, log=log, env=env)
    return worst


@contextmanager
def _cluster(
    session: Session, number: int, cores: int, env: Mapping[str, str], log: Path
) -> Iterator[None]:
    """Run Ray on this host; its processes may use only the first `cores` cores."""
    before = os.sched_getaffinity(0)
    if gpus():
        resources = [f"--num-gpus={number}"]
    else:
        recorded = json.dumps(dict.fromkeys(RECORDED, number))
        resources = ["--num-gpus=0", f"--resources={recorded}"]
    os.sched_setaffinity(0, sorted(before)[:cores])  # child processes inherit it
    try:
        _ray(
            session,
            *("start", "--head", f"--port={PORT}", "--disable-usage-stats"),
            *(f"--num-cpus={cores}", *resources, "--include-dashboard=false"),
            "--object-store-memory=200000000",
            log=log,
            env=env,
        )
        yield
    finally:
        _ray(session, "stop", "--force", log=log, env=env)
        os.sched_setaffinity(0, before)


def _ray(session: Session, *words: str, log: Path, env: Mapping[str, str]) -> None:
    """Run Ray's command; its long output goes to the log only."""
    command = (sys.executable, *RAY, *words)
    print(f"$ {' '.join(command)}", flush=True)
    if not session.dry_run:
        with log.open("ab") as file:
            environment = session.environment(env)
            subprocess.run(
                command, cwd=ROOT, env=environment, stdout=file, stderr=file, check=False
            )


@contextmanager
def _driver(session: Session, number: int, env: Mapping[str, str]) -> Iterator[float | None]:
    """Run the fleet; yield the seconds until every GPU has a worker that is ready."""
    words = [sys.executable, "-m", "service.cli.main", "fleet", "--address", f"127.0.0.1:{PORT}"]
    print(f"$ {' '.join(words)}", flush=True)
    if session.dry_run:
        yield None
        return
    output = session.file(f"fleet-{number}-driver", ".log")
    began = time.monotonic()
    with (
        output.open("wb") as file,
        subprocess.Popen(
            words,
            cwd=ROOT,
            env=session.environment(env),
            stdout=file,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        try:
            while not re.search(
                rf"gpus_ready.*\bgpus={number}\b", output.read_text(errors="replace")
            ):
                if process.poll() is not None or time.monotonic() > began + READY_WITHIN_S:
                    break
                time.sleep(0.2)
            seconds = round(time.monotonic() - began, 1)
            print(f"{number} GPUs after {seconds} s", flush=True)
            yield seconds
        finally:
            process.terminate()


def _tuned(session: Session, env: Mapping[str, str], log: Path) -> tuple[int, dict[str, Any]]:
    """Tune the suite on the fleet; return the exit status and the row of figures."""
    words = [word for dtype in session.dtypes for word in ("--dtype", dtype)]
    before, began = count_kernels(env), time.monotonic()
    code, document = session.ask(
        *("tune", "--suite", session.suite or SUITE, *words, "--fleet", "--again"),
        *("--effort", session.effort),
        log=log,
        env=env,
        time_limit=STAGE_S,
    )
    row = {
        "seconds": round(time.monotonic() - began, 1),
        "exit": code,
        "compiled": count_kernels(env) - before,
        "tuning_s": (document or {}).get("seconds"),
        "totals": (document or {}).get("totals"),
    }
    print(row, flush=True)
    return code, row | {
        "problems": [described(outcome) for outcome in (document or {}).get("outcomes", [])]
    }


def described(outcome: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of an outcome, and the GPU that measured it."""
    result = outcome["result"] or {}
    return {
        "problem": problem_text(outcome["problem"]),
        **outcome_figures(outcome),
        "gpu": (result.get("environment") or {}).get("gpu_uuid"),
        "interval": result.get("speedup"),
        "us": (result.get("statistics") or {}).get("median_us"),
        "default_us": (result.get("baseline") or {}).get("median_us"),
    }
