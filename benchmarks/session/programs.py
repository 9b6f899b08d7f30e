"""Unchanged programs: how long they wait for winners, and what the winners gain.

Each runs as a user would start it: `gemmsmith run --tune --rehearse`, then `gemmsmith run`, then
processes without and with `GEMMSMITH=auto` in turn. The database and the user's folders are new for
each program; the pack store begins with the carried packs, and what is compiled is counted. With a
bundle (--bundle) nothing is tuned: there are only the processes in turn, with the bundle as
`GEMMSMITH`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any

from benchmarks.session.core import ROOT, SITE, STATE, Deadline, Session, gpus
from benchmarks.session.waiting import count_kernels, place

SCRIPT = "benchmarks/programs/hugging.py"
_DECODE = ("--layers", "8", "--steps", "9", "--every", "1")
TWO_RANKS = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
PROGRAMS: Mapping[str, tuple[str, ...]] = {
    "example": ("examples/train.py",),
    "llama": (SCRIPT, "llama", "--steps", "18"),
    "llama-fsdp2": (*TWO_RANKS, SCRIPT, "llama", "--steps", "18"),
    "qwen3-moe": (SCRIPT, "qwen3-moe", "--steps", "18"),
    "gpt2": (SCRIPT, "gpt2", "--steps", "18"),
    "vit": (SCRIPT, "vit", "--steps", "23"),
    "qwen3": (SCRIPT, "qwen3", "--steps", "18"),
    "decode-1": (SCRIPT, "decode", "--rows", "1", *_DECODE),
    "decode-16": (SCRIPT, "decode", "--rows", "16", *_DECODE),
    "decode-64": (SCRIPT, "decode", "--rows", "64", *_DECODE),
    "falcon3": (SCRIPT, "falcon3", "--steps", "18"),
    "granite3": (SCRIPT, "granite3", "--steps", "18"),
    "phi2": (SCRIPT, "phi2", "--steps", "18"),
}
"""Script and options of each program. No suite had products of the last three when they were
measured; configs/suites/models.toml has MLPs of Granite 3's and Phi-2's widths since."""

TUNE_S, UNBUILT_S = 60, 140
"""Seconds after which no further problem is tuned; those with most time at stake come first. The
second limit is for a session without carried kernels."""

LIMIT_S = 240.0


def programs(session: Session) -> int:
    """Measure the chosen programs, eager and then compiled: programs-*.json."""
    deadline, worst = Deadline(session), 0
    rows: list[dict[str, Any]] = []
    chosen = [name for name in PROGRAMS if name in session.models]
    for mode in (name for name in ("eager", "compiled") if name in session.modes):
        for name in chosen:
            if deadline.over() or (mode == "compiled" and name == "example"):
                continue
            if _has_ranks(name) and gpus() < 2:
                continue
            row: dict[str, Any] = {"program": name, "mode": mode}
            rows.append(row)
            for part in _parts(session, name, mode):
                row |= part
                session.keep("programs", rows)
            worst = worst or int(row["exit"])
            print(json.dumps(row), flush=True)
    return worst


def _parts(session: Session, name: str, mode: str) -> Any:
    """Measure a program, and yield parts of its row; `exit` is the worst status so far."""
    words = [sys.executable, *PROGRAMS[name]]
    if mode == "compiled":
        words.append("--compile")
    env, tuned = _environment(session, name)
    bundle = None if session.bundle is None else str(session.bundle.resolve())
    if bundle is None and not tuned:
        before = count_kernels(env)
        limit = str(TUNE_S if before else UNBUILT_S)
        options = ("--effort", session.effort, "--time-limit", limit)
        cold = _timed(session, [*_gemmsmith("run", "--tune", "--rehearse", *options), *words], env)
        yield {"exit": cold["exit"], "cold": cold, "compiled": count_kernels(env) - before}
        if cold["exit"]:
            return
        winners = str(session.file(f"programs-winners-{name}", ".jsonl"))
        session.gemmsmith("export", winners, log=session.file("programs", ".log"), env=env)
    if bundle is None and mode == "eager":
        warm = _timed(session, [*_gemmsmith("run"), *words], env)
        yield {"exit": warm["exit"], "warm": warm}
    if SCRIPT not in PROGRAMS[name]:  # it does not print its times
        return
    turns: list[tuple[str, dict[str, Any]]] = []
    for number in range(2 * session.rounds + 1):
        ours = number % 2 == 1
        side = "gemmsmith" if ours else "torch"
        with_winners = {"GEMMSMITH": bundle or "auto"} if ours else {}
        last = ["--parts"] if number >= 2 * session.rounds - 1 else []
        turns.append((side, _timed(session, [*words, *last], env | with_winners)))
        exits = [turn["exit"] for _, turn in turns]
        yield {"exit": max(exits), "turns": [{"side": side} | turn for side, turn in turns]}
    yield gains([(side, (turn["result"] or {}).get("ms")) for side, turn in turns])


def gains(turns: Sequence[tuple[str, float | None]]) -> dict[str, Any]:
    """Compute the gains of alternating times in ms, of which the first and the last are torch's.

    A gain is the mean of torch's times before and after over ours. `torch_over_itself` has each of
    torch's times over its next.
    """
    times = [ms for _, ms in turns if ms is not None]
    if len(times) != len(turns) or len(times) < 3:
        return {"gain": None}
    ours = [(times[i - 1] + times[i + 1]) / 2 / times[i] for i in range(1, len(times), 2)]
    itself = [before / after for before, after in pairwise(times[::2])]
    return {
        "gain": round(sum(ours) / len(ours), 4),
        "gains": [round(gain, 4) for gain in ours],
        "torch_over_itself": [round(ratio, 4) for ratio in itself],
    }


def _has_ranks(name: str) -> bool:
    return TWO_RANKS[1] in PROGRAMS[name]


def _gemmsmith(*words: str) -> list[str]:
    return [sys.executable, "-m", "service.cli.main", *words, "--"]


def _environment(session: Session, name: str) -> tuple[dict[str, str], bool]:
    """Return the environment of a new user with gemmsmith, and whether it has winners already.

    A program of one process sees the session's GPU only.
    """
    folder = STATE / f"measured-{session.tag}" / f"program-{name}"
    tuned = any(folder.glob("data/gemmsmith/winners/*.gspack"))
    if not tuned:
        place(session, folder.name, STATE / "packs")
    if not session.dry_run:
        (folder / "site").mkdir(exist_ok=True)
        # An installation has this line in `gemmsmith.pth`.
        line = (ROOT / "client" / "gemmsmith.pth").read_text()
        (folder / "site" / "sitecustomize.py").write_text(line)
    env = {} if _has_ranks(name) else session.only_device()
    env |= {
        "GEMMSMITH_DATABASE": f"sqlite:///{folder / 'gemmsmith.db'}",
        "GEMMSMITH_PACKS": str(folder / "packs"),
        "PYTHONPATH": os.pathsep.join(
            [str(folder / "site"), str(SITE), str(ROOT / "client"), str(ROOT)]
        ),
        "PYTHONUNBUFFERED": "1",
        "XDG_DATA_HOME": str(folder / "data"),
        "XDG_STATE_HOME": str(folder / "state"),
        "XDG_CONFIG_HOME": str(folder / "config"),
        # Carried packs have the signature of another machine.
        "GEMMSMITH_UNSIGNED": "1",
        "GEMMSMITH_WINNERS": str(ROOT / "configs" / "winners"),
    }
    return env, tuned


def _timed(session: Session, words: Sequence[str], env: Mapping[str, str]) -> dict[str, Any]:
    """Run a program; return its status, its seconds, its messages, and its result if it printed
    one.

    `first_step` is the time of the last line of a step 0: `--tune` runs the program more than once.
    """
    print(f"$ {' '.join(words)}", flush=True)
    if session.dry_run:
        return {"exit": 0, "result": None}
    began, lines = time.monotonic(), list[tuple[float, str]]()
    with (
        _sampled(began, env) as samples,
        subprocess.Popen(
            words,
            cwd=ROOT,
            env={**os.environ, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            seconds = round(time.monotonic() - began, 2)
            lines.append((seconds, line.rstrip()))
            print(f"{seconds:7.2f} {line}", end="", flush=True)
            if seconds > LIMIT_S:
                process.terminate()
        code = process.wait()
    with session.file("programs", ".log").open("a") as log:
        log.write(f"$ {' '.join(words)}\n")
        log.writelines(f"{seconds:7.2f} {line}\n" for seconds, line in lines)
    firsts = [seconds for seconds, line in lines if line.startswith("step 0")]
    result = next((json.loads(line) for _, line in lines if line.startswith('{"ms"')), None)
    parts = [json.loads(line) for _, line in lines if line.startswith('{"parts"')]
    return {
        "exit": code,
        "seconds": round(time.monotonic() - began, 2),
        "first_step": firsts[-1] if firsts else None,
        "samples": samples,
        "saved": [
            (seconds, float(line.split()[3])) for seconds, line in lines if "saved so far" in line
        ],
        "said": [
            line.replace(f"{ROOT}/", "")
            for _, line in lines
            if line.startswith("gemmsmith") or " tuned, " in line
        ],
        "result": result,
        **(parts[0] if parts else {}),
    }


_MONITOR = ("--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "--loop-ms=500")
COMPILERS = frozenset({"cicc", "ptxas", "cudafe++", "cc1plus", "nvlink", "fatbinary"})


@contextmanager
def _sampled(began: float, env: Mapping[str, str]) -> Iterator[list[tuple[float, int, int]]]:
    """Fill a list with seconds, running compilers, and percent of the time that the GPU was busy.

    The GPU is the first of those that the program sees.
    """
    first = env.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    samples: list[tuple[float, int, int]] = []
    with subprocess.Popen(
        ("nvidia-smi", f"--id={first}", *_MONITOR),
        stdout=subprocess.PIPE,
        text=True,
    ) as monitor:

        def read() -> None:
            for line in monitor.stdout or ():
                seconds = round(time.monotonic() - began, 1)
                samples.append((seconds, _compilers(), int(line)))

        reader = Thread(target=read)
        reader.start()
        yield samples
        monitor.terminate()
        reader.join()


def _compilers() -> int:
    names = []
    for process in Path("/proc").glob("[0-9]*/comm"):
        with suppress(OSError):
            names.append(process.read_text().strip())
    return sum(name in COMPILERS for name in names)
