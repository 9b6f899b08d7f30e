"""Trials of a whole fleet into one PostgreSQL, and lookups that are answered meanwhile.

    python -m benchmarks.writers [--writers 64] [--batch 1] [--rate 2000] [--seconds 10]

A writer is like a worker to the database: it has leased a job, and adds trials behind that job's
fence, `--batch` of them in each transaction. First all writers write as fast as they can. Then they
write `--rate` trials a second, while a service on the same database gets lookups at a steady pace:
of answers in its memory, and of answers that it has to read. Rounds without writes are in between.
In a fleet the writers are on other machines. Here they share the cores with the rest, so they have
the lowest priority, and lookups mostly wait for the database.

The server keeps PostgreSQL's default settings, so that a commit is on the disk. Prints one JSON
document.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from benchmarks import load, million, servers
from gemmsmith.answers.answer import Conditions, Correctness, Statistics
from gemmsmith.core.problem import Problem
from service.documents import best_url
from tests.support import postgresql
from tuner.backends import candidates
from tuner.jobs import LeasedJob, Queue
from tuner.store import Store, upgrade
from tuner.trial import Phase, Trial, Winner

PROCESSES = 4
"""The writers are threads of this many processes: 64 would take longer to start than to measure."""

LOOKUP_EVERY_S = 0.01
"""Time between two lookups, long enough that they do not queue."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """The arguments of the writers of a process.

    Attributes:
        winner: the source of the trials' device and environment.
        first, writers: number of the first writer, and how many there are.
        rate: trials a second of each writer; 0 for as fast as it can.
    """

    url: str
    winner: Winner
    first: int
    writers: int
    batch: int
    rate: float


def problem(number: int) -> Problem:
    return Problem(m=64 * (1 + number), n=1024, k=512)


def trials(number: int, winner: Winner, job: str) -> Iterator[Trial]:
    """Yield distinct trials without end, like those of a screening."""
    tuned = problem(number)
    choices = candidates(tuned, winner.device)
    for turn in itertools.count():
        for index, candidate in enumerate(choices):
            us = 10.0 + index / 100
            yield Trial(
                problem=tuned,
                candidate=candidate,
                device=winner.device,
                environment=winner.environment,
                phase=Phase.SCREEN,
                statistics=Statistics(
                    median_us=us, ci_low_us=us - 0.1, ci_high_us=us + 0.1, samples=9
                ),
                samples_us=tuple(us + step / 1000 for step in range(9)),
                correctness=Correctness(
                    error=1e-3, max_error=2e-3, tolerance=1e-2, repeatable=True
                ),
                conditions=Conditions(
                    sm_clock_mhz=1755.0, power_w=640.5, temperature_c=55.0, throttle=()
                ),
                cost_s=0.02,
                job=f"{job}-{turn}",
            )


def work(order: Order, ready: Any, writing: Event, ended: Event) -> None:
    """Run the writers of a process."""
    os.nice(19)
    threads = [
        threading.Thread(target=_write, args=(order, number, ready, writing, ended))
        for number in range(order.first, order.first + order.writers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _write(order: Order, number: int, ready: Any, writing: Event, ended: Event) -> None:
    with Store.open(order.url) as store:
        leased = _lease(store, number)
        fenced = store.fenced(leased.fence)
        endless = trials(number, order.winner, leased.job.id)
        fenced.add_trials(list(itertools.islice(endless, order.batch)))  # connects and warms up
        ready.release()
        pause = order.batch / order.rate if order.rate else 0.0
        due = (
            time.monotonic() + pause * (number % 16) / 16
        )  # spread, so that writers do not coincide
        while not ended.is_set():
            if not writing.wait(0.1):
                continue
            fenced.add_trials(list(itertools.islice(endless, order.batch)))
            now = time.monotonic()
            due = max(due + pause, now - 1.0)  # catches up on at most a second
            time.sleep(max(0.0, due - now))


def _lease(store: Store, number: int) -> LeasedJob:
    leased = Queue(store).lease(f"writer-{number}", [f"gpu-{number}"], ttl_s=900)
    assert leased is not None
    return leased


class Writers:
    """All writers, in processes of their own. They wait until `write` is called."""

    def __init__(self, url: str, winner: Winner, number: int, *, batch: int, rate: float) -> None:
        with Store.open(url) as store:
            for writer in range(number):
                Queue(store).enqueue(problem(writer), device=f"gpu-{writer}")
        context = multiprocessing.get_context("spawn")
        self._writing, self._ended = context.Event(), context.Event()
        self._ready = context.Semaphore(0)
        share = -(-number // PROCESSES)
        self._processes = [
            context.Process(
                target=work,
                args=(
                    Order(
                        url=url,
                        winner=winner,
                        first=first,
                        writers=min(share, number - first),
                        batch=batch,
                        rate=rate / number,
                    ),
                    self._ready,
                    self._writing,
                    self._ended,
                ),
            )
            for first in range(0, number, share)
        ]
        self._number = number

    def __enter__(self) -> Writers:
        for process in self._processes:
            process.start()
        for _ in range(self._number):
            if not self._ready.acquire(timeout=120):
                raise TimeoutError("not all writers have a job")
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for process in self._processes:
            process.join()

    def write(self) -> None:
        self._writing.set()

    def rest(self) -> None:
        self._writing.clear()
        time.sleep(0.5)  # until the open transactions have ended


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Times of a round's lookups, and how many there were."""

    p50_ms: float
    p99_ms: float
    asked: int


def ask(url: str, paths: Iterator[str], seconds: float) -> Latency:
    """Send lookups at a steady pace, over one connection."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    connection.connect()
    took = []
    due = ends = time.perf_counter()
    ends += seconds
    while due < ends:
        time.sleep(max(0.0, due - time.perf_counter()))
        began = time.perf_counter()
        connection.request("GET", next(paths))
        reply = connection.getresponse()
        reply.read()
        took.append((time.perf_counter() - began) * 1e3)
        if reply.status != 200:
            raise RuntimeError(f"a lookup was answered with {reply.status}")
        due = max(due + LOOKUP_EVERY_S, time.perf_counter())
    connection.close()
    took.sort()
    return Latency(
        p50_ms=statistics.median(took), p99_ms=took[int(0.99 * len(took))], asked=len(took)
    )


def lookups(url: str, winners: Sequence[Winner]) -> Mapping[str, Iterator[str]]:
    """Return endless paths of lookups: of answers in the service's memory, and of new problems."""
    known = [best_url(winner.problem) for winner in winners]
    near = (
        best_url(replace(winner.problem, m=winner.problem.m + 8 * step))
        for step in itertools.count(1)
        for winner in winners
    )
    seen = set(known)
    fresh = (path for path in near if not (path in seen or seen.add(path)))  # type: ignore[func-returns-value]
    ask(url, iter(known), LOOKUP_EVERY_S * len(known) / 2)
    return {"in memory": itertools.cycle(known), "read": fresh}


def _count(url: str) -> int:
    with Store.open(url) as store:
        return store.counts()["trials"]


def _cpu_s(process: int) -> float:
    """Return the CPU seconds of a process and its descendants."""
    parent, spent = psutil.Process(process), 0.0
    for member in [parent, *parent.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):  # it was short-lived, so little is missing
            times = member.cpu_times()
            spent += times.user + times.system
    return spent


def capacity(url: str, server: int, writers: Writers, rounds: load.Rounds) -> dict[str, Any]:
    """Measure the trials a second of all writers, and the CPU time of a trial."""
    rates, costs = [], []
    for _ in range(rounds.rounds):
        before, began = _count(url), time.monotonic()
        spent = [_cpu_s(server), _cpu_s(os.getpid())]
        writers.write()
        time.sleep(rounds.seconds)
        added = _count(url) - before
        rates.append(added / (time.monotonic() - began))
        spent = [_cpu_s(server) - spent[0], _cpu_s(os.getpid()) - spent[1]]
        costs.append([seconds / added * 1e3 for seconds in spent])
        writers.rest()
    return {
        "trials_per_s": round(statistics.median(rates)),
        "of_each_round": [round(rate) for rate in rates],
        "server_core_ms_per_trial": round(statistics.median(cost[0] for cost in costs), 3),
        "writer_core_ms_per_trial": round(statistics.median(cost[1] for cost in costs), 3),
    }


def beside(
    database: str, url: str, winners: Sequence[Winner], writers: Writers, rounds: load.Rounds
) -> dict[str, Any]:
    """Measure lookups with and without writes, in turn."""
    paths = lookups(url, winners)
    measured: dict[str, dict[str, list[Latency]]] = {
        kind: {"idle": [], "loaded": []} for kind in paths
    }
    rates = []
    for _ in range(rounds.rounds):
        for kind, endless in paths.items():
            measured[kind]["idle"].append(ask(url, endless, rounds.seconds))
            before, began = _count(database), time.monotonic()
            writers.write()
            measured[kind]["loaded"].append(ask(url, endless, rounds.seconds))
            rates.append((_count(database) - before) / (time.monotonic() - began))
            writers.rest()
    document: dict[str, Any] = {"trials_per_s": [round(rate) for rate in rates]}
    for kind, states in measured.items():
        medians = {
            state: {
                name: round(statistics.median(getattr(latency, name) for latency in latencies), 2)
                for name in ("p50_ms", "p99_ms")
            }
            for state, latencies in states.items()
        }
        ratios = [
            loaded.p99_ms / idle.p99_ms
            for loaded, idle in zip(states["loaded"], states["idle"], strict=True)
        ]
        document[kind] = {
            **medians,
            "p99_ratio": round(medians["loaded"]["p99_ms"] / medians["idle"]["p99_ms"], 2),
            "p99_ratios": [round(ratio, 2) for ratio in ratios],
            "asked": sum(latency.asked for latency in states["loaded"]),
        }
    return document


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    binaries = postgresql.programs()
    if binaries is None:
        sys.exit("PostgreSQL's server programs are missing: apt-get install postgresql")
    rounds = load.Rounds(rounds=arguments.rounds, seconds=arguments.seconds)
    winners = servers.shipped()
    first = next(winner for winner in winners if winner.candidate is not None)
    document: dict[str, Any] = {
        "machine": {**load.machine(), "load": os.getloadavg()[0]},
        "writers": arguments.writers,
        "batch": arguments.batch,
    }
    with ExitStack() as running:
        folder = Path(running.enter_context(tempfile.TemporaryDirectory()))
        server = running.enter_context(postgresql.server(binaries, durable=True))
        for name in ("capacity", "beside"):
            postgresql.administer(server.url, f"CREATE DATABASE {name}")
            upgrade(f"{server.url}/{name}")
        url = f"{server.url}/capacity"
        with Writers(url, first, arguments.writers, batch=arguments.batch, rate=0.0) as writers:
            document |= capacity(url, server.pid(), writers, rounds)
        if arguments.rate:
            url = f"{server.url}/beside"
            with Store.open(url) as store:
                million.take(store, servers.WINNERS)
            address = running.enter_context(servers.served(url, folder / "packs"))
            with Writers(
                url, first, arguments.writers, batch=arguments.batch, rate=arguments.rate
            ) as writers:
                document["lookups"] = beside(url, address, winners, writers, rounds)
    return document


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.writers")
    parser.add_argument("--writers", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1, help="trials of a transaction")
    parser.add_argument(
        "--rate", type=float, default=2000.0, help="trials/s beside lookups; 0: none"
    )
    parser.add_argument("--seconds", type=int, default=10, help="length of a round")
    parser.add_argument("--rounds", type=int, default=3)
    document = measure(parser.parse_args())
    sys.stdout.write(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
