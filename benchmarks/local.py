"""The time that gemmsmith itself takes, without a GPU: `make bench`.

Every figure is the median of repeated runs on this machine, with its 99th percentile. The service
is a uvicorn process on a port with the shipped winners. The tuning run has the default effort on
the shipped recordings. At the end it prints how close the search comes to the recorded optima with
how many trials, as `gemmsmith eval` does.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import msgspec

from benchmarks import load, million, servers, wrk
from gemmsmith.core.problem import DType, Problem
from gemmsmith.http.client import Client
from gemmsmith.winners.lookup import Lookup
from service.cli import evaluate
from tuner.backends import candidates
from tuner.devices import open_device
from tuner.search.ranking import by_time, predictions
from tuner.search.run import TuningRun
from tuner.store import Store
from tuner.trial import Phase, Trial


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A measured time in milliseconds."""

    what: str
    median_ms: float
    p99_ms: float
    runs: int


def measure(what: str, run: Callable[[int], object], runs: int) -> Figure:
    """Time `run(0)`, `run(1)`, … after one untimed call."""
    run(0)
    times = []
    for i in range(runs):
        began = time.perf_counter()
        run(i)
        times.append((time.perf_counter() - began) * 1e3)
    times.sort()
    worst = times[min(len(times) - 1, int(0.99 * len(times)))]
    return Figure(what=what, median_ms=statistics.median(times), p99_ms=worst, runs=runs)


def figures(folder: Path) -> Iterator[Figure]:
    """Measure all times, one after the other."""
    winners = servers.shipped()
    model = winners[0].device
    large = Problem(m=4096, n=6144, k=4096)

    def rank(_: int) -> object:
        legal = candidates(large, model)
        return by_time(legal, predictions(large, legal, model))

    yield measure(
        "enumerate and rank one problem (4096×6144×4096 bf16)",
        rank,
        20,
    )
    with Store.open(f"sqlite:///{folder / 'bench.db'}", create=True) as store:
        million.take(store, servers.WINNERS)
        yield measure(
            "exact lookup in the store",
            lambda i: store.winner(winners[i % len(winners)].problem, model.slug),
            500,
        )
        first = winners[0]
        assert first.candidate is not None
        trial = Trial(
            problem=first.problem,
            candidate=first.candidate,
            device=model,
            environment=first.environment,
            phase=Phase.SCREEN,
            statistics=first.statistics,
        )
        yield measure(
            "add one trial, durably",
            lambda i: store.add_trial(replace(trial, job=f"bench-{i}")),
            300,
        )
        with open_device("replay:", sweeps=servers.SWEEPS) as device:
            yield measure(
                "tune 256×4096×4096 bf16 on the recorded H200, default effort",
                lambda i: TuningRun(
                    problem=Problem(m=256, n=4096, k=4096, dtype=DType.BF16),
                    device=device,
                    store=store,
                    builder=None,
                    job=f"tune-{i}",
                ).tune(),
                3,
            )
    with servers.service(folder / "served.db") as url, httpx.Client(base_url=url) as http:
        with Client(url, cache_dir=None) as client:
            lookup = Lookup(client.snapshot(model.slug))
            yield measure(
                "GET /snapshot, every winner of one device, read by the client",
                lambda _: client.snapshot(model.slug),
                20,
            )
        keys = [(str(p.dtype), str(p.layout), p.m, p.n, p.k) for p in (w.problem for w in winners)]
        repeated = (keys * (1000 // len(keys) + 1))[:1000]

        def look_up(_: int) -> None:
            for dtype, layout, m, n, k in repeated:
                lookup.lookup(dtype, layout, m, n, k)

        yield measure("1,000 lookups in memory: as many µs each", look_up, 200)
        questions: list[dict[str, Any]] = [
            {
                "m": w.problem.m,
                "n": w.problem.n,
                "k": w.problem.k,
                "batch": w.problem.batch,
                "dtype": w.problem.dtype,
                "layout": w.problem.layout,
            }
            for w in winners
        ]
        yield measure(
            "GET /best, exact, over HTTP",
            lambda i: http.get("/best", params=questions[i % len(questions)]).raise_for_status(),
            500,
        )
        near = [{**question, "m": question["m"] + 8} for question in questions]
        yield measure(
            "GET /best, a problem that was not tuned",
            lambda i: http.get("/best", params=near[i % len(near)]),
            300,
        )
        yield from predicted(http, near)


def predicted(http: httpx.Client, near: Sequence[Mapping[str, Any]]) -> Iterator[Figure]:
    """Measure lookups of problems without a neighbour, with the sizes of `near`."""
    # No shipped winner has these types, so these problems have no neighbours.
    alone = [{**question, "dtype": "fp8_e5m2", "layout": "tn"} for question in near]
    for question in alone:  # the kernels of each alignment are made once
        http.get("/best", params=question).raise_for_status()
    # Each is requested once, because a second answer would come from memory.
    new = [{**alone[i % len(alone)], "n": 4096 + 16 * i} for i in range(301)]
    before = _within(http)
    yield measure(
        "GET /best, predicted, asked for the first time",
        lambda i: http.get("/best", params=new[i + 1 if i else 0]).raise_for_status(),
        300,
    )
    yield _in_the_service(before, _within(http))
    many = [{**alone[i % len(alone)], "k": 64 + 16 * i} for i in range(1000)]
    yield measure(
        "POST /best:batch, 1,000 predicted",
        lambda _: http.post("/best:batch", json={"problems": many}, timeout=60).raise_for_status(),
        3,
    )


_BUCKET = re.compile(r'gemmsmith_request_seconds_bucket{le="(.+)",route="/best"} (.+)')


def _within(http: httpx.Client) -> dict[float, float]:
    """Return the service's counts of `GET /best` that it answered within each bound, in seconds."""
    buckets = _BUCKET.findall(http.get("/metrics").raise_for_status().text)
    return {float(bound): float(count) for bound, count in buckets}


def _in_the_service(before: Mapping[float, float], after: Mapping[float, float]) -> Figure:
    """Compute the service's own times between two readings, interpolated in its buckets."""
    counts = [(bound, count - before.get(bound, 0.0)) for bound, count in sorted(after.items())]
    total = counts[-1][1]

    def quantile(share: float) -> float:
        low, below = 0.0, 0.0
        for bound, within in counts:
            if within >= share * total:
                return (low + (bound - low) * (share * total - below) / (within - below)) * 1e3
            low, below = bound, within
        return math.inf

    what = "the same, in the service: from the request to the end of its answer"
    return Figure(what=what, median_ms=quantile(0.5), p99_ms=quantile(0.99), runs=int(total))


def predicted_alone(folder: Path) -> Iterator[Figure]:
    near = [msgspec.to_builtins(winner.problem) for winner in servers.shipped()]
    with servers.service(folder / "served.db") as url, httpx.Client(base_url=url) as http:
        yield from predicted(http, [{**question, "m": question["m"] + 8} for question in near])


def main() -> int:
    """Print the table, or with --json the figures and the machine."""
    parser = argparse.ArgumentParser(description="What gemmsmith itself costs, without a GPU.")
    parser.add_argument("--json", action="store_true", dest="as_json")
    parser.add_argument(
        "--predicted", action="store_true", help="only lookups of problems without neighbours"
    )
    options = parser.parse_args()

    def say(line: str) -> None:
        print(line, file=sys.stderr if options.as_json else sys.stdout, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        measured = []
        for figure in (predicted_alone if options.predicted else figures)(Path(folder)):
            measured.append(figure)
            say(f"{figure.median_ms:10.2f} ms   p99 {figure.p99_ms:8.2f} ms   {figure.what}")
        if options.predicted:
            if options.as_json:
                costs = [asdict(figure) for figure in measured]
                print(json.dumps({"machine": load.machine(), "figures": costs}, indent=1))
            return 0
        loaded = []
        try:
            for line in load.measure(Path(folder), load.Rounds()):
                loaded.append(line)
                say(load.text(line))
        except wrk.WrkMissingError as error:
            say(f"{error}. Without it there are no figures of the service under load.")
    judged = evaluate.Judged.of(evaluate.load(servers.SWEEPS))
    if options.as_json:
        costs = [asdict(figure) for figure in measured]
        under_load = [asdict(line) for line in loaded]
        document = {"machine": load.machine(), "figures": costs, "load": under_load}
        print(json.dumps({**document, "search": judged.summary()}, indent=1))
    else:
        judged.print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
