"""How busy a fleet keeps its GPUs, and how many trials the database takes from all of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import chain
from typing import Any

from benchmarks.readme.shipped import RESULTS


def _runs(kind: str) -> list[dict[str, Any]]:
    """Read the newest runs of a kind of `benchmarks.fleet` and `benchmarks.writers`.

    A run that was limited to some of its machine's cores has their number.
    """
    newest = max(RESULTS.glob("*-fleet.json"))
    runs = json.loads(newest.read_text(encoding="utf-8"))["runs"]
    return [
        run[kind] | {name: run[name] for name in ("cores",) if name in run}
        for run in runs
        if kind in run
    ]


def _rate(run: Mapping[str, Any]) -> float:
    return float(run["attempts"] / run["seconds"])


def clusters() -> str:
    """Write a row for each cluster."""
    runs = _runs("cluster")
    single = next(run for run in runs if run["gpus"] == 1)
    lines = [
        "| GPUs on nodes | jobs | killed | busy while a job was ready | jobs/s | over one GPU's |",
        "|---|---|---|---|---|---|",
    ]
    for run in runs:
        killed = ", ".join(f"{number} × {what}" for what, number in run["faults"].items())
        ended = ", ".join(f"{number:,} {state}" for state, number in run["jobs"].items())
        injected = run["injected"]
        times = (
            f"{injected['pause_s']:g} s a candidate, {injected['compile_s']:g} s a unit; "
            f"load {run['load']:.0f}"
        )
        faster = "–"
        if run["gpus"] > 1 and injected["pause_s"] == single["injected"]["pause_s"]:
            faster = f"{_rate(run) / _rate(single):.1f} ×"
        lines.append(
            f"| {run['gpus']} on {run['nodes']}; {times} | {ended} | {killed or '–'} "
            f"| {run['busy']:.1%} | {_rate(run):.3g} | {faster} |"
        )
    effects = [run["took_effect"] for run in runs]
    lost = [
        max(chain(*(effect[name] for effect in effects)))
        for name in ("worker_lost_s", "node_lost_s")
    ]
    separate = [effect for effect in effects if "node_started_s" in effect]
    joined = list(chain(*(effect["node_joined_s"] for effect in separate)))
    started = list(chain(*(effect["node_started_s"] for effect in separate)))
    sentences = (
        f"The driver acted on a lost worker within {lost[0]:g} s and on a lost node within "
        f"{lost[1]:g} s."
    )
    if joined:
        sentences += (
            f" It had workers on a new node {min(joined):g} to {max(joined):g} s after Ray knew of "
            f"the node, whose start took Ray {min(started):g} to {max(started):g} s."
        )
    lines += ["", sentences]
    return "\n".join(lines)


def simulated() -> str:
    """Write a row for each simulation."""
    lines = [
        "| GPUs, cores | jobs, of them cold | compile, measure | ideal | took | busy while a job "
        "was ready | of all time |",
        "|---|---|---|---|---|---|---|",
    ]
    for run in _runs("simulate"):
        assumed = run["assumed"]
        lines.append(
            f"| {assumed['gpus']:,}, {assumed['cores']:,} "
            f"| {assumed['jobs']:,}, {assumed['cold']:.0%} "
            f"| {assumed['compile_s']:g} s, {assumed['measure_s']:g} s "
            f"| {run['ideal_s']:.0f} s | {run['seconds']:.0f} s "
            f"| {run['busy']:.1%} | {run['busy_of_all']:.1%} |"
        )
    return "\n".join(lines)


def writers() -> str:
    """Write a row for each size of transactions."""
    lines = [
        "| cores | trials in a transaction | 64 writers, as fast as they can | of a core each: "
        "PostgreSQL, writer | meanwhile, lookups | p99 idle | p99 loaded | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run in _runs("writers"):
        costs = (
            f"{run['server_core_ms_per_trial']:.2f} ms, {run['writer_core_ms_per_trial']:.2f} ms"
        )
        machine = run["machine"]
        start = (
            f"| {run.get('cores', machine['cores'])} | {run['batch']} "
            f"| {run['trials_per_s']:,} trials/s, load {machine['load']:.0f} | {costs} "
        )
        beside: Mapping[str, Any] = run.get("lookups", {})
        rates = beside.get("trials_per_s", [0])
        rows = [
            f"{start}| {kind}, beside {min(rates):,} … {max(rates):,} trials/s "
            f"| {times['idle']['p99_ms']:.1f} ms | {times['loaded']['p99_ms']:.1f} ms "
            f"| {times['p99_ratio']:.2f} ({min(times['p99_ratios']):.2f} … "
            f"{max(times['p99_ratios']):.2f}) |"
            for kind, times in beside.items()
            if kind != "trials_per_s"
        ]
        lines += rows or [f"{start}| – | – | – | – |"]
    return "\n".join(lines)
