"""The service under load, and a bare FastAPI route: part of `make bench`, or by itself with

    python -m benchmarks.load [--seconds 5] [--rounds 3] [--winners 1000000] [--json FILE]

Rounds alternate between the compared servers, and each figure is the median of its rounds, so that
other load of the machine affects all of them. A ratio has the lowest and the highest of the rounds
beside it. Tuning beside lookups is measured in the same way: worker and writer are suspended in
every other round. wrk sends requests over 16 connections. The service has one uvicorn process, as
has the bare route, which returns a constant as long as the answer.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import msgspec

from benchmarks import million, servers, wrk
from gemmsmith.core.problem import Problem
from gemmsmith.core.tuning import Effort
from service.documents import best_url
from tuner.devices import open_device
from tuner.devices.replay import ReplayDevice
from tuner.store import Store

BATCH = 10_000
BATCHES = 7
MANY_PATHS = 10_000


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """How many rounds there are, and their length."""

    rounds: int = 3
    seconds: int = 5


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of the table.

    Attributes:
        what: its title.
        loads: medians of the rounds, by name.
        ratios: ratios of those medians.
        ranges: the lowest and the highest ratio of a round.
    """

    what: str
    loads: Mapping[str, wrk.Load]
    ratios: Mapping[str, float]
    ranges: Mapping[str, tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Span:
    """A measured time, and that of the first repeat."""

    what: str
    median_ms: float
    first_ms: float


Loads = Mapping[str, Sequence[wrk.Load]]
"""Loads of the rounds, by the name of what was measured."""


def alternate(rounds: Rounds, targets: Mapping[str, tuple[str, Sequence[str]]]) -> Loads:
    """Measure the load of each target, an address and paths, in turn."""
    loads: dict[str, list[wrk.Load]] = {name: [] for name in targets}
    for url, paths in targets.values():
        _warm(url, paths)
    for _ in range(rounds.rounds):
        for name, (url, paths) in targets.items():
            loads[name].append(wrk.run(url, paths, rounds.seconds))
    return loads


def beside_work(rounds: Rounds, url: str, paths: Sequence[str]) -> Loads:
    """Measure the load while workers and writers are suspended, and while they work, in turn."""
    loads: dict[str, list[wrk.Load]] = {"busy": [], "idle": []}
    _warm(url, paths)
    for _ in range(rounds.rounds):
        with servers.standing_still():
            loads["idle"].append(wrk.run(url, paths, rounds.seconds))
        loads["busy"].append(wrk.run(url, paths, rounds.seconds))
    return loads


def _warm(url: str, paths: Sequence[str]) -> None:
    """Request every path once, so that the answers are in the service's memory."""
    with httpx.Client(base_url=url) as client:
        for path in paths:
            client.get(path).raise_for_status()


def compared(what: str, loads: Loads, measured: str, base: str) -> Line:
    """Make a line of `measured` with its ratios to `base`."""
    medians = {name: wrk.Load.median(loads[name]) for name in (measured, base)}
    rounds = [
        _ratios(mine, other) for mine, other in zip(loads[measured], loads[base], strict=True)
    ]
    ratios = _ratios(medians[measured], medians[base])
    ranges = {
        name: (min(ratio[name] for ratio in rounds), max(ratio[name] for ratio in rounds))
        for name in ratios
    }
    return Line(what=what, loads=medians, ratios=ratios, ranges=ranges)


def _ratios(mine: wrk.Load, other: wrk.Load) -> dict[str, float]:
    return {"requests": mine.per_second / other.per_second, "p99": mine.p99_ms / other.p99_ms}


def batch(what: str, url: str, problems: Sequence[Problem]) -> Span:
    """Measure `POST /best:batch`, from sending the request to the answer's last byte."""
    body = msgspec.json.encode({"problems": problems})
    times = []
    for _ in range(BATCHES):
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=600)
        connection.connect()
        began = time.perf_counter()
        connection.request("POST", "/best:batch", body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        content = reply.read()
        times.append((time.perf_counter() - began) * 1e3)
        connection.close()
        if reply.status != 200 or len(msgspec.json.decode(content)["answers"]) != len(problems):
            raise RuntimeError(f"the batch was answered with {reply.status}: {content[:300]!r}")
    return Span(what=what, median_ms=statistics.median(times[1:]), first_ms=times[0])


def shipped(folder: Path, rounds: Rounds) -> Iterator[Line | Span]:
    """Measure the shipped winners: lookups, a batch, and lookups beside tuning and writing."""
    database = folder / "shipped.db"
    winners = servers.shipped()
    paths = [best_url(winner.problem) for winner in winners]
    with ExitStack() as running:
        url = running.enter_context(servers.service(database, "--worker"))
        size = len(httpx.get(url + paths[0]).content)
        bare = running.enter_context(servers.bare(size))
        loads = alternate(
            rounds,
            {"bare": (bare, ["/best"]), "one": (url, paths[:1]), "many": (url, paths)},
        )
        yield compared("GET /best, one problem", loads, "one", "bare")
        yield compared(f"GET /best, {len(paths)} problems in turn", loads, "many", "bare")
        near = (
            replace(winner.problem, m=winner.problem.m + 8 * step)
            for step in itertools.count()
            for winner in winners
        )
        distinct = list(itertools.islice(dict.fromkeys(itertools.islice(near, 2 * BATCH)), BATCH))
        yield batch(
            f"POST /best:batch, {len(distinct):,} problems, mostly not measured", url, distinct
        )
        with open_device("replay:", sweeps=servers.SWEEPS) as device:
            assert isinstance(device, ReplayDevice)
            recorded = device.problems
        with httpx.Client(base_url=url, timeout=60) as client:
            for problem in recorded:
                order = {**msgspec.to_builtins(problem), "effort": Effort.EXHAUSTIVE}
                client.post("/tune", json=order).raise_for_status()
        running.enter_context(servers.writing(database))
        _until_tuning(url)
        with Store.open(f"sqlite:///{database}") as store:
            before = store.counts()["trials"]
            loads = beside_work(rounds, url, paths)
            rate = (store.counts()["trials"] - before) / (rounds.rounds * rounds.seconds)
        if not _is_tuning(url):
            raise RuntimeError("the tuning jobs ended before the measurement did")
        what = f"the same while jobs are tuned and {rate:,.0f} trials a second written"
        yield compared(what, loads, "busy", "idle")


def _is_tuning(url: str) -> bool:
    return bool(httpx.get(f"{url}/jobs?state=running").json()["jobs"])


def _until_tuning(url: str) -> None:
    deadline = time.monotonic() + 60
    while not _is_tuning(url):
        if time.monotonic() > deadline:
            raise RuntimeError("no worker takes the tuning jobs")
        time.sleep(0.1)


def large(folder: Path, count: int, rounds: Rounds) -> Iterator[Line | Span]:
    """Measure a database of `count` winners: start-up, lookups, a batch."""
    database = folder / f"winners-{count}.db"
    if not database.exists():
        making = database.with_suffix(".part")
        making.unlink(missing_ok=True)
        million.fill(making, servers.WINNERS, count)
        making.rename(database)
    problems = million.sample(database, max(BATCH, MANY_PATHS))
    paths = [best_url(problem) for problem in problems]
    starts = [_start_up(database) for _ in range(rounds.rounds)]
    yield Span(
        what=f"from the start of the process to /readyz, {count:,} winners",
        median_ms=statistics.median(starts),
        first_ms=starts[0],
    )
    with servers.service(database) as url:
        size = len(httpx.get(url + paths[0]).content)
        yield batch(f"POST /best:batch, {BATCH:,} of {count:,} winners", url, problems[:BATCH])
        with servers.bare(size) as bare:
            loads = alternate(
                rounds,
                {"bare": (bare, ["/best"]), "one": (url, paths[:1]), "many": (url, paths)},
            )
        yield compared(f"GET /best, one of {count:,} winners", loads, "one", "bare")
        yield compared(
            f"GET /best, {len(paths):,} of {count:,} winners in turn", loads, "many", "bare"
        )


def _start_up(database: Path) -> float:
    began = time.perf_counter()
    with servers.service(database) as url:
        httpx.get(f"{url}/readyz").raise_for_status()
        return (time.perf_counter() - began) * 1e3


def measure(folder: Path, rounds: Rounds, winners: int = 1_000_000) -> Iterator[Line | Span]:
    """Measure everything, line by line.

    Raises:
        wrk.WrkMissingError: wrk is not installed; the message says how to install it.
    """
    yield from shipped(folder, rounds)
    if winners:
        yield from large(folder, winners, rounds)


def machine() -> dict[str, object]:
    return {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}


def text(entry: Line | Span) -> str:
    """Write a line of the table."""
    if isinstance(entry, Span):
        return f"{entry.median_ms:10.0f} ms   first {entry.first_ms:8.0f} ms   {entry.what}"
    lines = [
        f"{load.per_second:10,.0f} /s   p50 {load.p50_ms:6.2f} ms   p99 {load.p99_ms:6.2f} ms"
        f"   {name}"
        for name, load in entry.loads.items()
    ]
    ratios = ", ".join(
        f"{name} × {ratio:.2f} ({entry.ranges[name][0]:.2f} … {entry.ranges[name][1]:.2f})"
        for name, ratio in entry.ratios.items()
    )
    return "\n".join([f"{entry.what}: {ratios}", *lines])


def main() -> int:
    """Print the table; with --json write the figures and the machine, too."""
    parser = argparse.ArgumentParser(description="The service under load, beside a bare route.")
    parser.add_argument("--seconds", type=int, default=5, help="length of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--winners", type=int, default=1_000_000, help="0 for the shipped ones only"
    )
    parser.add_argument("--folder", type=Path, help="keeps the database of many winners")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rounds = Rounds(rounds=options.rounds, seconds=options.seconds)
    measured = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        try:
            for entry in measure(folder, rounds, options.winners):
                measured.append(entry)
                print(text(entry), flush=True)
        except wrk.WrkMissingError as error:
            print(error, file=sys.stderr)
            return 1
    if options.json:
        document = {"machine": machine(), "load": [asdict(entry) for entry in measured]}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
