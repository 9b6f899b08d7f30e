"""What gemmsmith itself costs, without a GPU: `make bench`.

Every figure is the median of repeated runs on this machine, with its 99th percentile. The service
is a real uvicorn process on a real port with the shipped winners; the tuning run is the default
effort on the shipped recordings. Last comes how close the search comes to the recorded optima, in
how many trials: what `gemmsmith eval` prints.
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
from tuner.search.cost_model import AnalyticModel
from tuner.search.ranking import ranked
from tuner.search.run import tune
from tuner.store import Store
from tuner.trial import Phase, Trial


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured cost in milliseconds."""

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
    """Everything `make bench` measures, one after the other."""
    winners = servers.shipped()
    model = winners[0].device
    large = Problem(m=4096, n=6144, k=4096)
    ranker = AnalyticModel()
    yield measure(
        "enumerate and rank one problem (4096×6144×4096 bf16)",
        lambda _: ranked(large, candidates(large, model), model, ranker),
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
                lambda i: tune(
                    Problem(m=256, n=4096, k=4096, dtype=DType.BF16),
                    device=device,
                    store=store,
                    builder=None,
                    ranker=ranker,
                    job=f"tune-{i}",
                ),
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
        asked: list[dict[str, Any]] = [
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
            lambda i: http.get("/best", params=asked[i % len(asked)]).raise_for_status(),
            500,
        )
        near = [{**question, "m": question["m"] + 8} for question in asked]
        yield measure(
            "GET /best, a problem nobody tuned",
            lambda i: http.get("/best", params=near[i % len(near)]),
            300,
        )
        yield from predicted(http, near)


def predicted(http: httpx.Client, near: Sequence[Mapping[str, Any]]) -> Iterator[Figure]:
    """What the service takes for problems without any winner near, of the sizes of `near`."""
    # No shipped winner has these types, so there is no neighbour either.
    alone = [{**question, "dtype": "fp8_e5m2", "layout": "tn"} for question in near]
    for question in alone:  # the kernels of each alignment are made once
        http.get("/best", params=question).raise_for_status()
    # Each asked once: what was asked before is answered from memory.
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
    """How many `GET /best` the service has answered within so many seconds, by its own clock."""
    found = _BUCKET.findall(http.get("/metrics").raise_for_status().text)
    return {float(bound): float(count) for bound, count in found}


def _in_the_service(before: Mapping[float, float], after: Mapping[float, float]) -> Figure:
    """What the service itself took for what was asked in between, interpolated in its buckets."""
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
    """`predicted`, of a service of its own."""
    near = [msgspec.to_builtins(winner.problem) for winner in servers.shipped()]
    with servers.service(folder / "served.db") as url, httpx.Client(base_url=url) as http:
        yield from predicted(http, [{**question, "m": question["m"] + 8} for question in near])


def main() -> int:
    """Print the table, or with --json the figures and the machine."""
    parser = argparse.ArgumentParser(description="What gemmsmith itself costs, without a GPU.")
    parser.add_argument("--json", action="store_true", dest="as_json")
    parser.add_argument(
        "--predicted", action="store_true", help="only what is answered without any winner near"
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
            for found in load.measure(Path(folder), load.Rounds()):
                loaded.append(found)
                say(load.text(found))
        except wrk.WrkMissingError as error:
            say(f"{error}. Without it there are no figures of the service under load.")
    judged = evaluate.Judged.of(evaluate.load(servers.SWEEPS))
    if options.as_json:
        costs = [asdict(figure) for figure in measured]
        under_load = [asdict(found) for found in loaded]
        found_all = {"machine": load.machine(), "figures": costs, "load": under_load}
        print(json.dumps({**found_all, "search": judged.summary()}, indent=1))
    else:
        judged.print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
