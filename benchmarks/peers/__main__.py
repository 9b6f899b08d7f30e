"""`python -m benchmarks.peers`: measures every peer on every problem of a suite.

    python -m benchmarks.peers --dtype bf16 --out DIR [--suite FILE] [--limit N] [--time-limit S]

Writes DIR/peers-<dtype>.json after each problem and prints the table at the end. gemmsmith's
winners come from configs/winners/ and from the database, its packs from the pack store; packs that
are missing are built first.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from benchmarks.peers.records import BASELINE, Report, Request, Row
from benchmarks.peers.roster import PEERS
from benchmarks.peers.supervisor import Supervisor
from benchmarks.peers.table import GEMMSMITH, markdown
from benchmarks.peers.winners import add_packs, find_packs, find_winners
from gemmsmith.core.problem import DType, Problem
from gemmsmith.files import publish
from tuner.measure.gpu_lock import gpu_lock
from tuner.measure.local_gpu import gpu_uuid, local_gpu
from tuner.suites import SuiteProblem, load
from tuner.trial import Winner

ROOT = Path(__file__).resolve().parents[2]
SUITE = Path(__file__).with_name("problems.toml")
NAMES = [peer.name for peer in PEERS]
SEED = 20261121
BUILD_SHARE = 0.5
"""Share of the time limit that building missing packs may take."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line."""

    suite: Path
    dtype: str
    out: Path
    limit: int | None
    time_limit: float
    ordinal: int
    peers: tuple[str, ...]
    rounds: int
    winners: tuple[Path, ...]
    database: str | None
    packs: Path
    dry_run: bool


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; 0 if every problem was measured."""
    options = parse(arguments)
    problems = load(options.suite).problems(options.dtype)[: options.limit]
    unavailable = {
        peer.name: reason
        for peer in PEERS
        if peer.name in options.peers and (reason := peer.available()) is not None
    }
    model = local_gpu(options.ordinal)
    winners = find_winners(options.winners, options.database, model)
    if options.dry_run:
        _describe(options, problems, winners, unavailable)
        return 0
    if model is None:
        print(f"no CUDA device {options.ordinal} on this machine; --dry-run lists what would run")
        return 2
    deadline = time.monotonic() + options.time_limit
    report = Report(
        dtype=options.dtype,
        suite=options.suite.name,
        recorded_at=datetime.now(UTC).isoformat(timespec="seconds"),
        seed=SEED,
        rounds=options.rounds,
        unavailable=unavailable,
    )
    packs, reasons = find_packs(
        [w.candidate.kernel for _, p in problems if (w := winners.get(p)) and w.candidate],
        options.packs,
        time.monotonic() + BUILD_SHARE * options.time_limit,
    )
    command = [sys.executable, "-m", "benchmarks.peers.child", str(options.ordinal)]
    running = tuple(name for name in options.peers if name not in unavailable)
    with gpu_lock(gpu_uuid(options.ordinal)), Supervisor(command) as supervisor:
        for entry, problem in problems:
            if time.monotonic() > deadline:
                print(f"time limit: {len(problems) - len(report.rows)} problems left", flush=True)
                break
            winner = winners.get(problem)
            row = supervisor.measure(_request(problem, winner, packs, reasons, running, options))
            use = "" if winner is None else str(winner.use)
            report.rows.append(msgspec.structs.replace(row, origin=entry.origin, use=use))
            if supervisor.ready is not None:
                report.device = supervisor.ready.device
                report.environment = supervisor.ready.environment
            _write(report, options.out)
            print(_progress(len(report.rows), len(problems), row), flush=True)
    print(f"\n{markdown(report, options.peers)}", flush=True)
    measured = sum(row.failure is None for row in report.rows)
    return 0 if measured == len(problems) else 1


def parse(arguments: Sequence[str] | None) -> Options:
    """Parse the command line and the environment."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--suite", type=Path, default=SUITE)
    parser.add_argument("--dtype", default=DType.BF16.value, help="such as bf16, bf16.symmetric")
    parser.add_argument("--out", type=Path, default=ROOT / ".gpu-out")
    parser.add_argument("--limit", type=int, help="only the first N problems")
    parser.add_argument("--time-limit", type=float, default=1800.0, help="seconds")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--peer", action="append", choices=NAMES, help="default: all")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--winners", type=Path, action="append", help="winners files")
    parser.add_argument("--database", default=os.environ.get("GEMMSMITH_DATABASE"))
    add_packs(parser)
    parser.add_argument("--dry-run", action="store_true", help="list problems and peers only")
    parsed = parser.parse_args(arguments)
    kind, _, ordinal = parsed.device.partition(":")
    if kind != "cuda" or not (ordinal or "0").isdecimal():
        parser.error(f"--device must be cuda or cuda:N, not {parsed.device}")
    return Options(
        suite=parsed.suite,
        dtype=parsed.dtype,
        out=parsed.out,
        limit=parsed.limit,
        time_limit=parsed.time_limit,
        ordinal=int(ordinal or 0),
        peers=tuple(n for n in NAMES if n == BASELINE or parsed.peer is None or n in parsed.peer),
        rounds=parsed.rounds,
        winners=tuple(parsed.winners or sorted((ROOT / "configs" / "winners").glob("*.jsonl"))),
        database=parsed.database or None,
        packs=parsed.packs,
        dry_run=parsed.dry_run,
    )


def _request(
    problem: Problem,
    winner: Winner | None,
    packs: dict[str, Path],
    reasons: dict[str, str],
    peers: tuple[str, ...],
    options: Options,
) -> Request:
    candidate = winner.candidate if winner is not None else None
    pack = packs.get(candidate.kernel.name) if candidate is not None else None
    reason = ""
    if winner is None:
        reason = "no winner for this problem on this device model: tune it first"
    elif candidate is None:
        reason = "no kernel survived the tuning of this problem"
    elif pack is None:
        reason = reasons.get(candidate.kernel.name, "no pack")
    return Request(
        problem=problem,
        peers=peers,
        rounds=options.rounds,
        seed=SEED,
        candidate=candidate if pack is not None else None,
        pack=None if pack is None else str(pack),
        reason=reason,
    )


def _write(report: Report, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(report), indent=1)
    publish(out / f"peers-{report.dtype}.json", text + b"\n", durable=False, shared=True)


def _progress(number: int, total: int, row: Row) -> str:
    head = f"[{number}/{total}] {row.problem}:"
    if row.failure is not None:
        return f"{head} {row.failure}"
    cells = [
        f"{name} {entry.ratio.median:.3f}" if entry.ratio else f"{name} — ({entry.reason})"
        for name, entry in row.entries.items()
        if name != BASELINE
    ]
    return f"{head} {', '.join(cells)}"


def _describe(
    options: Options,
    problems: Sequence[tuple[SuiteProblem, Problem]],
    winners: dict[Problem, Winner],
    unavailable: dict[str, str],
) -> None:
    for name in options.peers:
        print(f"{name}: {unavailable.get(name, 'available')}")
    print(f"\n{len(problems)} problems of {options.suite}:")
    for entry, problem in problems:
        winner = winners.get(problem)
        note = f"{GEMMSMITH} has no winner" if winner is None else f"winner says {winner.use}"
        print(f"  {problem} ({entry.origin}): {note}")


if __name__ == "__main__":
    sys.exit(main())
