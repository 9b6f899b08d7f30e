#!/usr/bin/env python3
"""One script for a GPU host that has torch, nvcc and no internet: set up, test, tune, record.

    python3 benchmarks/gpu_session.py STEP [STEP …] [--out DIR] [--dry-run]

Steps run in the order given. Each writes its results into --out as it goes, so a session that is
cut off keeps what it had; a failing step is reported and the next one still runs.

    test      tests/gpu, with the machine-readable report gpu-tests.json
    cold      one problem with an empty pack store, then again warm: cold.json
    compile   the kernels of the suite's problems
    tune      the suite with the compiled kernels; winners are exported as winners-*.jsonl
    record    exhaustive sweeps: sweep-*.jsonl.zst
    packs     the pack store as archives packs-*.tar, to carry into the next session

The wheels come from .wheels/ (`make wheels` on a machine with internet), carried packs from
.packs/. Only the standard library is used here: nothing else is installed yet.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / ".gpu-site"
STATE = ROOT / ".state"
CARRIED = ROOT / ".packs"
SUITE = "configs/suites/llm.toml"
SWEEPS = "configs/suites/sweeps.toml"
ARCHIVE_BYTES = 15 * 2**20
COLD_PROBLEM = ("4096", "6144", "4096")


@dataclass(frozen=True, kw_only=True)
class Session:
    """Where things go, and how long each step may take."""

    out: Path
    dry_run: bool
    dtypes: tuple[str, ...]
    time_limit: int
    effort: str
    limit: int | None

    def command(self, *words: str, log: str, env: dict[str, str] | None = None) -> int:
        """Run a command with the carried packages, its output shown and kept in --out."""
        print(f"$ {' '.join(words)}", flush=True)
        if self.dry_run:
            return 0
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(SITE), str(ROOT / "client"), str(ROOT)]),
            "PYTHONUNBUFFERED": "1",
            "GEMMSMITH_DATABASE": f"sqlite:///{self.out / 'gemmsmith.db'}",
            "GEMMSMITH_PACKS": str(STATE / "packs"),
            **(env or {}),
        }
        with (self.out / log).open("ab") as file:
            process = subprocess.Popen(
                words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            assert process.stdout is not None
            for line in process.stdout:
                file.write(line)
                sys.stdout.write(line.decode(errors="replace"))
                sys.stdout.flush()
            return process.wait()

    def gemmsmith(self, *words: str, log: str, env: dict[str, str] | None = None) -> int:
        """Run the command line of this checkout."""
        return self.command(sys.executable, "-m", "service.cli.main", *words, log=log, env=env)


def prepare(session: Session) -> int:
    """Install the wheels into a folder of their own and unpack carried packs."""
    session.out.mkdir(parents=True, exist_ok=True)
    if not session.dry_run and not (
        any(Path("/dev").glob("nvidia*")) or shutil.which("nvidia-smi")
    ):
        print("no NVIDIA GPU on this machine; these steps need one (see `gemmsmith doctor`)")
        return 2
    wheels = sorted(str(path) for path in (ROOT / ".wheels").glob("*.whl"))
    if wheels and not SITE.exists():
        code = session.command(
            *(sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"),
            *("--no-compile", "--target", str(SITE), *wheels),
            log="setup.log",
        )
        if code:
            return code
    (STATE / "packs").mkdir(parents=True, exist_ok=True)
    for archive in sorted(CARRIED.glob("packs-*.tar*")):
        print(f"unpacking {archive.name}", flush=True)
        with tarfile.open(archive) as tar:
            tar.extractall(STATE / "packs", filter="data")
    return session.gemmsmith("db", "upgrade", log="setup.log")


def test(session: Session) -> int:
    """tests/gpu, with its report."""
    return session.command(
        *(sys.executable, "-m", "pytest", "tests/gpu", "-q", "-x" if session.dry_run else "-q"),
        *("-p", "no:cacheprovider"),
        log="gpu-tests.log",
        env={"GEMMSMITH_GPU_REPORT": str(session.out / "gpu-tests.json")},
    )


def cold(session: Session) -> int:
    """One bf16 problem, first with an empty pack store, then warm."""
    packs = STATE / "cold-packs"
    shutil.rmtree(packs, ignore_errors=True)
    env = {
        "GEMMSMITH_PACKS": str(packs),
        "GEMMSMITH_DATABASE": f"sqlite:///{session.out / 'cold.db'}",
    }
    session.gemmsmith("db", "upgrade", log="cold.log", env=env)
    seconds = {}
    for which in ("cold", "warm"):
        began = time.monotonic()
        code = session.gemmsmith(
            "tune", *COLD_PROBLEM, "--device", "cuda:0", "--again", log="cold.log", env=env
        )
        seconds[which] = round(time.monotonic() - began, 1)
        if code:
            return code
    result = {"problem": COLD_PROBLEM, "cores": os.cpu_count(), "seconds": seconds}
    print(json.dumps(result), flush=True)
    if not session.dry_run:
        (session.out / "cold.json").write_text(json.dumps(result) + "\n")
    return 0


def compile_kernels(session: Session) -> int:
    """Everything the default effort may want for the suite, or the best of each problem."""
    words = [word for dtype in session.dtypes for word in ("--dtype", dtype)]
    if session.limit is not None:
        words += ["--limit", str(session.limit)]
    return session.gemmsmith("compile", "--suite", SUITE, *words, log="compile.log")


def tune(session: Session) -> int:
    """The suite, one precision after the other, exporting what there is after each."""
    deadline = time.monotonic() + session.time_limit
    worst = 0
    for dtype in session.dtypes:
        left = str(max(10, int(deadline - time.monotonic())))
        code = session.gemmsmith(
            *("tune", "--suite", SUITE, "--dtype", dtype, "--device", "cuda:0"),
            *("--time-limit", left, "--effort", session.effort, "--compiled-only"),
            log=f"tune-{dtype}.log",
        )
        worst = worst or code
        session.gemmsmith(
            *("export", str(session.out / f"winners-{dtype}.jsonl"), "--dtype", dtype),
            log=f"tune-{dtype}.log",
        )
    return worst


def record(session: Session) -> int:
    """Exhaustive sweeps of a few varied problems."""
    worst = 0
    for dtype in session.dtypes:
        if dtype == "fp16":
            continue
        code = session.gemmsmith(
            *("record", "--suite", SWEEPS, "--dtype", dtype, "--device", "cuda:0"),
            *("-o", str(session.out / f"sweep-{dtype}.jsonl.zst")),
            log=f"record-{dtype}.log",
        )
        worst = worst or code
    return worst


def packs(session: Session) -> int:
    """The pack store, in archives small enough to be carried."""
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
            tar = tarfile.open(session.out / f"packs-{number}.tar", "w")  # noqa: SIM115
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
    "cold": cold,
    "compile": compile_kernels,
    "tune": tune,
    "record": record,
    "packs": packs,
}


def main() -> int:
    """Parse the arguments, run the steps, and say how each ended."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("steps", nargs="+", choices=STEPS)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ROOT / ".gpu-out")))
    parser.add_argument("--dry-run", action="store_true", help="print the commands only")
    parser.add_argument("--dtype", action="append", help="bf16, fp16, fp8_e4m3 (default: all)")
    parser.add_argument("--time-limit", type=int, default=3600, help="seconds for tune")
    parser.add_argument("--effort", default="default")
    parser.add_argument("--limit", type=int, help="kernels of each problem to compile")
    options = parser.parse_args()
    session = Session(
        out=options.out.resolve(),
        dry_run=options.dry_run,
        dtypes=tuple(options.dtype or ("bf16", "fp16", "fp8_e4m3")),
        time_limit=options.time_limit,
        effort=options.effort,
        limit=options.limit,
    )
    outcomes = {"prepare": prepare(session)}
    for step in options.steps if outcomes["prepare"] == 0 else []:
        began = time.monotonic()
        outcomes[step] = STEPS[step](session)
        print(f"== {step}: exit {outcomes[step]}, {time.monotonic() - began:.0f} s", flush=True)
    print(json.dumps(outcomes), flush=True)
    return max(outcomes.values())


if __name__ == "__main__":
    sys.exit(main())
