"""A winner alone at its own clock, and cuBLAS alone at its own, which paired rounds cannot measure.

    python -m benchmarks.alone FILE.jsonl … -o alone.json [--device cuda:N] [--seconds 0.3]

In paired rounds all candidates share one clock: their samples are shorter than the GPU's power
control takes, so a candidate that draws more power slows all of them. Here each side runs for some
tenths of a second without the other, in turn; the first half of each turn is not timed. The result
has for each problem both times and their paired ratio, each side's clock, power and joules a
launch, the power penalty of finals, and the ratio of the paired rounds in the winners file.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.peers.peer import Unsupported
from benchmarks.peers.winners import add_packs, find_packs, find_winners
from benchmarks.side_by_side import SideBySide, WrongProductError, prepare
from gemmsmith.files import publish
from tuner.measure.local_gpu import gpu_uuid, local_gpu
from tuner.measure.power import penalty
from tuner.measure.statistics import paired_ratio
from tuner.trial import Winner

if TYPE_CHECKING:
    from gemmsmith.core.device import DeviceModel
    from tuner.measure.conditions import Monitor

BUILD_LIMIT_S = 300.0
OURS, THEIRS = "gemmsmith", "cublas"


@dataclass(frozen=True, kw_only=True)
class Turn:
    """The timed half of a turn; zeros mean unknown.

    Attributes:
        us: time per launch.
        joules: per launch, by the driver's counter.
    """

    us: float
    sm_clock_mhz: int
    power_w: float
    joules: float


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every winner could be measured."""
    options = _parse(arguments)
    ordinal = int(options.device.partition(":")[2] or 0)
    model = local_gpu(ordinal)
    winners = [
        winner
        for winner in find_winners(options.winners, None, model).values()
        if winner.candidate is not None and (options.all or not winner.use.is_default)
    ]
    if model is None:
        print(f"no CUDA GPU {ordinal} on this machine; {len(winners)} winners would be measured")
        return 2
    kernels = {w.candidate.kernel.name: w.candidate.kernel for w in winners if w.candidate}
    packs, reasons = find_packs(
        list(kernels.values()), options.packs, time.monotonic() + BUILD_LIMIT_S
    )
    rows: list[dict[str, Any]] = []
    for winner in winners:
        rows.append(_measured(winner, packs, reasons, model, ordinal, options))
        document = {"device": model.slug, "seconds": options.seconds, "problems": rows}
        publish(options.output, json.dumps(document).encode() + b"\n", shared=True)
        print(line(rows[-1]), flush=True)
    return 1 if any(row["error"] for row in rows) else 0


def row(winner: Winner, turns: dict[str, list[Turn]]) -> dict[str, Any]:
    """Make a problem's row of its turns, with the power penalty that finals would compute."""
    times = {name: [turn.us for turn in taken] for name, taken in turns.items()}
    medians = {name: _medians(taken) for name, taken in turns.items()}
    return {
        "problem": str(winner.problem),
        "use": winner.use.value,
        "paired": None if winner.speedup is None else winner.speedup.median,
        "alone": asdict(paired_ratio(times[THEIRS], times[OURS])),
        "power_penalty": penalty(medians[OURS]["sm_clock_mhz"], medians[THEIRS]["sm_clock_mhz"]),
        **medians,
        "error": None,
    }


def line(row: dict[str, Any]) -> str:
    """Write a problem's row for a log."""
    if row["error"]:
        return f"{row['problem']}: {row['error']}"
    sides = "; ".join(
        f"{name} {side['us']:.2f} µs, {side['sm_clock_mhz']:.0f} MHz, {side['power_w']:.0f} W, "
        f"{side['joules'] * 1e3:.2f} mJ"
        for name, side in ((name, row[name]) for name in (OURS, THEIRS))
    )
    paired = "unknown" if row["paired"] is None else f"{row['paired']:.3f}"
    cost = f"power penalty {row['power_penalty']:.3f}"
    ratios = f"alone {row['alone']['median']:.3f}, paired {paired}, {cost}"
    return f"{row['problem']}: {ratios}; {sides}"


def _medians(turns: Sequence[Turn]) -> dict[str, float]:
    return {
        name: median(getattr(turn, name) for turn in turns) for name in Turn.__dataclass_fields__
    }


def _measured(
    winner: Winner,
    packs: dict[str, Path],
    reasons: dict[str, str],
    model: DeviceModel,
    ordinal: int,
    options: argparse.Namespace,
) -> dict[str, Any]:
    from tuner.measure.conditions import Monitor

    assert winner.candidate is not None
    name = winner.candidate.kernel.name
    failed = {"problem": str(winner.problem), "error": reasons.get(name)}
    if name not in packs:
        return failed
    try:
        both = prepare(winner.problem, winner.candidate, packs[name], model, ordinal)
    except (WrongProductError, Unsupported) as error:
        return failed | {"error": str(error)}
    monitor = Monitor(gpu_uuid(ordinal))
    return row(winner, _turns(both, monitor, options.seconds, options.pairs))


def _turns(both: SideBySide, monitor: Monitor, seconds: float, pairs: int) -> dict[str, list[Turn]]:
    from benchmarks.peers.measure import only, time_us
    from tuner.measure.graphs import Event, TorchGraph
    from tuner.measure.timing import CLOCK_REPLAY_US, Timer, launches_per_replay

    start, end = Event(), Event()
    timer = Timer(both.stream, monitor)
    graphs: dict[str, TorchGraph] = {}
    # Replays of LOOK_REPLAY_US keep the GPU busy while its clock and its energy are read.
    for name, ready in both.ready.items():
        estimate = time_us(ready.launch, both.sets, both.stream, monitor)
        launches = launches_per_replay(estimate, both.sets, CLOCK_REPLAY_US)
        graphs[name] = TorchGraph(both.stream, launches, only(ready.launch))

    def turn(name: str) -> Turn:
        graph = graphs[name]
        replays, before, reading = 0, 0.0, None
        for ran in timer.busy(graph, seconds):
            if ran < seconds / 2:
                continue
            if ran >= seconds:
                end.record(both.stream)  # after the last replay
                continue
            if not replays:
                before = monitor.energy_j()
                start.record(both.stream)  # after this replay; the following ones are timed
            elif reading is None and ran >= 0.75 * seconds:
                reading = monitor.read()
            replays += 1
        end.wait()
        launches = max(1, replays - 1) * graph.launches
        reading = reading or monitor.read()
        return Turn(
            us=end.microseconds_since(start) / launches,
            sm_clock_mhz=reading.sm_clock_mhz,
            power_w=reading.power_w,
            joules=(monitor.energy_j() - before) / launches,
        )

    turns: dict[str, list[Turn]] = {name: [] for name in graphs}
    for pair in range(pairs):
        for name in sorted(graphs, reverse=pair % 2 == 1):
            turns[name].append(turn(name))
    for graph in graphs.values():
        graph.close()
    return turns


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.alone",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("winners", type=Path, nargs="+", help="winners files")
    parser.add_argument("--device", default="cuda:0", help="cuda:N")
    add_packs(parser)
    parser.add_argument(
        "--seconds", type=float, default=0.3, help="length of a turn, half of it timed"
    )
    parser.add_argument("--pairs", type=int, default=6, help="turns of each side")
    parser.add_argument("--all", action="store_true", help="also where cuBLAS stays")
    parser.add_argument("-o", "--output", type=Path, required=True, help="result to write")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
