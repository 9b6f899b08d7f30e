"""Measures how well a fleet keeps its GPUs busy, on one machine.

`python -m benchmarks.fleet cluster` starts a Ray cluster of several nodes on this machine and a
PostgreSQL, with recorded GPUs of three models, and candidates and compilers that take a set time.
At random moments it kills workers, nodes (another one joins) and the driver, and restarts
PostgreSQL. It checks that nothing was lost or done twice.

`python -m benchmarks.fleet simulate` runs the queue, in the order of `tune --fleet`, for many GPUs
in virtual time. The times of jobs are drawn; the assumptions are printed.

Each prints one JSON document.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.breaking import Breaker, effects, wait
from gemmsmith.core.candidate import Candidate
from gemmsmith.core.problem import Problem
from service.cli.runner import fleet_order
from service.cli.tasks import Task
from service.fleet.plan import Machine, compile_tasks
from tests.support import fake_nvcc, postgresql
from tests.support.cluster import LocalCluster
from tests.support.ledger import verify
from tests.support.recordings import record, some_candidates
from tests.support.replacing import replace
from tests.support.serving import H200
from tuner.jobs import LeasedJob, Queue
from tuner.jobs.stages import Stage, StagedQueue, hand_to_gpus
from tuner.store import Store, upgrade

MODELS = [replace(H200, name=f"NVIDIA {name}") for name in ("H200", "H300", "H400")]

SHARED = 8
"""So many problems in a row have the same kernels; the next ones have others."""


@dataclass(frozen=True)
class Attempt:
    """A lease of a job: a GPU of a model had it from `began` to `ended`, in seconds.

    From `ready` on the job could have been leased.
    """

    model: str
    ready: float
    began: float
    ended: float


def problems(number: int) -> list[Problem]:
    return [Problem(m=64 * (1 + i), n=1024, k=512) for i in range(number)]


def chosen(problem: Problem) -> list[Candidate]:
    """Return eight candidates of a problem, with the kernels of its group of `SHARED` problems."""
    candidates = some_candidates(problem, count=10_000)
    first = (problem.m // 64 - 1) // SHARED * 8 % (len(candidates) - 8)
    return candidates[first : first + 8]


def cluster(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    models = MODELS[: arguments.gpus]
    per_model = -(-arguments.jobs // arguments.gpus) * -(-arguments.gpus // len(models))
    fake_nvcc.toolchain(folder / "nvcc", each_s=arguments.compile_s)
    (folder / "sweeps").mkdir()
    for model in models:
        record(
            folder / "sweeps",
            *problems(per_model),
            name=model.slug,
            device=model,
            choose=chosen,
        )
    binaries = postgresql.programs()
    if binaries is None:
        sys.exit("PostgreSQL's server programs are missing: apt-get install postgresql")
    with postgresql.server(binaries) as server:
        postgresql.administer(server.url, "CREATE DATABASE fleet")
        url = f"{server.url}/fleet"
        upgrade(url)
        environ = {
            "GEMMSMITH_DATABASE": url,
            "GEMMSMITH_PACKS": str(folder / "packs"),
            "GEMMSMITH_SWEEPS": str(folder / "sweeps"),
            "GEMMSMITH_TEST_NVCC": str(folder / "nvcc"),
            "GEMMSMITH_TEST_PAUSE_S": str(arguments.pause_s),
            "GEMMSMITH_TEST_TTL_S": str(arguments.ttl_s),
        }
        with LocalCluster(folder, environ) as ray:
            shares = _shares(arguments.gpus, arguments.nodes)
            for gpus in shares:
                ray.join(cores=arguments.cores, gpus=gpus)
            ray.drive()
            wait(lambda: ray.log().count("gpu ready") >= arguments.gpus, 600, "GPUs")
            jobs = _order(url, arguments.gpus, arguments.jobs)
            with Store.open(url) as store:
                breaker = Breaker(ray, server, store, arguments, list(shares), len(jobs))
                faults = list(breaker.run()) if arguments.kill else []
                wait(breaker.over, arguments.patience_s, "jobs")
            ray.end_driver()
        ended = verify(url, jobs)
        with Store.open(url) as store:
            attempts = list(_attempts(Queue(store), jobs))
    injected = ("compile_s", "pause_s", "ttl_s", "every_s", "seed")
    return {
        "injected": {name: getattr(arguments, name) for name in injected},
        "jobs": dict(ended),
        "gpus": arguments.gpus,
        "nodes": arguments.nodes,
        "faults": dict(Counter(fault["killed"] for fault in faults)),
        "took_effect": effects(faults),
        "load": os.getloadavg()[0],
        **_figures(attempts, _by_model(shares)),
    }


def _by_model(shares: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Count the GPUs of each model, by its slug."""
    return {
        model.slug: sum(share.get(f"replay:{model.slug}", 0) for share in shares)
        for model in MODELS
    }


def _shares(gpus: int, nodes: int) -> list[dict[str, int]]:
    """Spread recorded GPUs over the nodes, models in turn."""
    shares: list[dict[str, int]] = [{} for _ in range(nodes)]
    for number in range(gpus):
        name = f"replay:{MODELS[number % len(MODELS)].slug}"
        share = shares[number // len(MODELS) % nodes]
        share[name] = share.get(name, 0) + 1
    return shares


def _order(url: str, gpus: int, number: int) -> list[str]:
    """Request equally many jobs for each GPU, the longest first; return their ids."""
    models = [MODELS[gpu % gpus % len(MODELS)] for gpu in range(number)]
    most = max(Counter(model.slug for model in models).values())
    tasks = fleet_order([Task(problem=problem, origin="") for problem in problems(most)], H200)
    left = {model.slug: iter(tasks) for model in MODELS}
    with Store.open(url) as store:
        queue = Queue(store)
        return [
            queue.enqueue(next(left[model.slug]).problem, device=model.slug)[0].id
            for model in models
        ]


def _attempts(queue: Queue, jobs: Sequence[str]) -> Iterator[Attempt]:
    """Read the GPUs' leases of each job from its events, without the compilers' leases."""
    for job in jobs:
        model = queue.get(job).device
        owner, ready, began, last = "", 0.0, 0.0, 0.0
        for event in queue.events(job, limit=10_000):
            if event.kind in ("started", "requeued", "finished", "failed"):
                if owner and ":compile:" not in owner:
                    died = event.kind == "started"  # its lease ended with its last event
                    ended = last if died else event.at
                    yield Attempt(model=model, ready=ready, began=began, ended=ended)
                ready = began = event.at
                owner = ""
                if event.kind == "started":
                    owner, ready = event.data["owner"], last
            last = event.at


def _figures(attempts: Sequence[Attempt], gpus: Mapping[str, int]) -> dict[str, Any]:
    """Compute how busy the GPUs were.

    `busy` is their share of the time in which a job was ready for them; `busy_of_all` is their
    share of the time from the first to the last lease.
    """
    first = min(attempt.ready for attempt in attempts)
    last = max(attempt.began for attempt in attempts)
    used = usable = 0.0
    for model, number in gpus.items():
        of_model = [attempt for attempt in attempts if attempt.model == model]
        # Changes in the numbers of jobs that are ready or running, and of those that are running.
        changes = sorted(
            [(attempt.ready, 1, 0) for attempt in of_model]
            + [(attempt.began, 0, 1) for attempt in of_model]
            + [(attempt.ended, -1, -1) for attempt in of_model]
        )
        before, present, running = first, 0, 0
        for at, more, begun in changes:
            used += (at - before) * running
            usable += (at - before) * min(number, present)
            before, present, running = at, present + more, running + begun
    whole = sum(gpus.values()) * max(last - first, 1e-9)
    until_last = sum(max(0.0, min(a.ended, last) - a.began) for a in attempts)
    mean = sum(attempt.ended - attempt.began for attempt in attempts) / len(attempts)
    return {
        "seconds": round(max(attempt.ended for attempt in attempts) - first, 2),
        "attempts": len(attempts),
        "mean_attempt_s": round(mean, 3),
        "attempts_per_s": round(len(attempts) / max(last - first, 1e-9), 3),
        "busy": round(used / usable, 4),
        "busy_of_all": round(until_last / whole, 4),
    }


def simulate(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the queue of a database with simulated GPUs and compilers, whose times are drawn."""
    draw = Random(arguments.seed)
    url = f"sqlite:///{folder}/simulated.db"
    upgrade(url)
    tasks = [
        Task(
            problem=Problem(
                m=64 * draw.randrange(1, 2**8), n=128 * draw.randrange(1, 2**7), k=64 * (1 + i)
            ),
            origin="",
        )
        for i in range(arguments.jobs)
    ]
    machine = Machine(id="all", resources={"CPU": float(arguments.cores)})
    at, works = 0.0, count()
    running: list[tuple[float, int, Attempt | None, LeasedJob]] = []
    attempts: list[Attempt] = []
    with Store.open(url) as store:
        queue, compiling = Queue(store), StagedQueue(store, Stage.COMPILE)
        measuring = StagedQueue(store, Stage.MEASURE)
        takes: dict[str, tuple[float, float]] = {}
        for task in fleet_order(tasks, H200):
            job = queue.enqueue(task.problem)[0]
            cold = draw.random() < arguments.cold
            # The longest jobs come first; the estimate of their order is right up to a factor of 2.
            size = draw.uniform(0.7, 1.4) * (2.0 - len(takes) / len(tasks))
            takes[job.id] = (arguments.compile_s * size * cold, arguments.measure_s * size)
        due, compilers, idle = len(tasks), 0, arguments.gpus
        ready = 0
        since_when: dict[str, float] = {}
        while due or running:
            start = compile_tasks([machine], cores=4, due=due, running=compilers)
            for _ in range(start):
                leased = compiling.lease(f"c{next(works)}", [], 900)
                assert leased is not None
                until = at + takes[leased.job.id][0]
                heapq.heappush(running, (until, next(works), None, leased))
                due, compilers = due - 1, compilers + 1
            while idle and ready:
                leased = measuring.lease(f"g{next(works)}", [], 900)
                assert leased is not None
                until = at + takes[leased.job.id][1]
                since = since_when.pop(leased.job.id)
                attempt = Attempt(model="", ready=since, began=at, ended=until)
                heapq.heappush(running, (until, next(works), attempt, leased))
                idle, ready = idle - 1, ready - 1
            at, _, done, leased = heapq.heappop(running)
            if done is None:
                hand_to_gpus(leased, [], {})
                since_when[leased.job.id] = at
                compilers, ready = compilers - 1, ready + 1
            else:
                leased.complete(None)
                attempts.append(done)
                idle += 1
    ideal = sum(measure for _, measure in takes.values()) / arguments.gpus
    return {
        "assumed": {
            "gpus": arguments.gpus,
            "cores": arguments.cores,
            "jobs": arguments.jobs,
            "cold": arguments.cold,
            "compile_s": arguments.compile_s,
            "measure_s": arguments.measure_s,
        },
        "ideal_s": round(ideal, 2),
        **_figures(attempts, {"": arguments.gpus}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet")
    kinds = parser.add_subparsers(dest="kind", required=True)
    real = kinds.add_parser("cluster")
    real.add_argument("--gpus", type=int, default=32)
    real.add_argument("--nodes", type=int, default=4)
    real.add_argument("--jobs", type=int, default=1000)
    real.add_argument("--cores", type=int, default=2, help="cores of each node, for compilers")
    real.add_argument("--compile-s", type=float, default=2.0, help="seconds of each unit")
    real.add_argument(
        "--pause-s", type=float, default=1.5, help="seconds of each candidate on a GPU"
    )
    real.add_argument("--ttl-s", type=float, default=20.0)
    real.add_argument("--every-s", type=float, default=30.0, help="between two kills, on average")
    real.add_argument("--seed", type=int, default=0, help="decides what is killed when")
    real.add_argument("--patience-s", type=float, default=3600.0)
    real.add_argument("--kill", action=argparse.BooleanOptionalAction, default=True)
    virtual = kinds.add_parser("simulate")
    virtual.add_argument("--gpus", type=int, default=1000)
    virtual.add_argument("--cores", type=int, default=16_000)
    virtual.add_argument("--jobs", type=int, default=10_000)
    virtual.add_argument("--cold", type=float, default=0.2, help="share of jobs that compile")
    virtual.add_argument("--compile-s", type=float, default=60.0)
    virtual.add_argument("--measure-s", type=float, default=6.0)
    virtual.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gemmsmith-fleet-") as folder:
        # An absolute path: PostgreSQL and Ray's workers have other users or working folders.
        run = cluster if arguments.kind == "cluster" else simulate
        document = run(arguments, Path(folder))
    sys.stdout.write(json.dumps({arguments.kind: document}, indent=2) + "\n")


if __name__ == "__main__":
    main()
