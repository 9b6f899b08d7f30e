"""Cold batches, and snapshots of many winners.

    python -m benchmarks.cold --winners 200000 --folder FOLDER

Each measurement has a service process of its own. Memory is the process's peak beyond its memory
when it was ready. This process sends requests over 16 connections, as fast as they are answered.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import msgspec

from benchmarks import million, servers
from gemmsmith.core.problem import Layout, Problem
from tuner.store import Store

CONNECTIONS = 16
SECONDS = 5


def unmeasured(count: int) -> list[Problem]:
    """Return random problems, mostly far from any that has a winner."""
    draw = random.Random(1)
    problems: dict[Problem, None] = {}  # in order, without duplicates
    while len(problems) < count:
        dtype = draw.choice(("bf16", "fp16", "fp8_e4m3"))
        layout = Layout.TN if dtype.startswith("fp8") else draw.choice([*Layout])
        m, n, k = (max(1, int(2 ** draw.uniform(low, 14)) // 8) * 8 for low in (3, 4, 4))
        problems[Problem(m=m, n=n, k=k, dtype=dtype, layout=layout)] = None
    return list(problems)


def beside(known: Sequence[Problem], count: int) -> list[Problem]:
    """Return problems close to `known` ones, which have winners."""
    draw = random.Random(2)
    problems = (replace(p, m=p.m + 8 * draw.randrange(1, 8), n=p.n + 8) for p in known)
    return list(dict.fromkeys(problems))[:count]


@contextmanager
def measured(database: Path) -> Iterator[tuple[str, Path]]:
    """Run a service until it is ready and idle; yield its address and its folder in /proc."""
    with servers.service(database) as url:
        httpx.get(f"{url}/readyz").raise_for_status()
        me = os.getpid()
        [child] = Path(f"/proc/{me}/task/{me}/children").read_text().split()
        process, before = Path("/proc", child), -1.0
        while cpu_s(process) - before > 0.1:  # it still draws a chart of its winners
            before = cpu_s(process)
            time.sleep(1.0)
        yield url, process


def peak_mb(process: Path) -> float:
    """Return the peak memory of a process, in MiB."""
    lines = (process / "status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def cpu_s(process: Path) -> float:
    user, system = (process / "stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def batch(database: Path, problems: Sequence[Problem], title: str) -> None:
    """Measure a cold batch, the first request of the service."""
    body = msgspec.json.encode({"problems": problems})
    with measured(database) as (url, process):
        httpx.get(f"{url}/best?m=7&n=999&k=77").raise_for_status()  # loads the predictor
        before, began = cpu_s(process), time.perf_counter()
        headers = {"Content-Type": "application/json"}
        reply = httpx.post(f"{url}/best:batch", content=body, headers=headers, timeout=600)
        seconds = time.perf_counter() - began
        nearest = reply.text.count('"match":"nearest"')
        print(
            f"{seconds:8.2f} s  {cpu_s(process) - before:6.2f} s of CPU  {title}: {nearest} nearest"
        )


def snapshot(database: Path, title: str) -> None:
    """Measure the first snapshot, and then the rate of further ones."""
    with measured(database) as (url, process):
        idle, before, began = peak_mb(process), cpu_s(process), time.perf_counter()
        with httpx.stream("GET", f"{url}/snapshot", headers=PLAIN, timeout=600) as reply:
            size = sum(map(len, reply.iter_raw()))
        seconds, cpu = time.perf_counter() - began, cpu_s(process) - before
        tag = reply.headers["etag"]
        more = peak_mb(process) - idle
        print(
            f"{seconds:8.2f} s  {cpu:6.2f} s of CPU  {more:6.0f} MB  first {title}, {size:,} bytes"
        )
        requests = {
            "304": {"If-None-Match": tag},
            "gzip": {"Accept-Encoding": "gzip"},
            "plain": PLAIN,
        }
        for name, headers in requests.items():
            httpx.get(f"{url}/snapshot", headers=headers, timeout=600)
            before = cpu_s(process)
            rate = asyncio.run(load(url, headers))
            used = (cpu_s(process) - before) / SECONDS
            print(f"{rate:8.1f} /s  {used:6.0%} of a CPU  {title}, {name}")
        print(f"{peak_mb(process) - idle:8.0f} MB at the end")


PLAIN = {"Accept-Encoding": "identity"}


async def load(url: str, headers: dict[str, str]) -> float:
    """Return the answers a second to `GET /snapshot`."""
    address = urlsplit(url)
    lines = ["GET /snapshot HTTP/1.1", f"Host: {address.netloc}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    request = "\r\n".join([*lines, "", ""]).encode()
    until = time.monotonic() + SECONDS

    async def connection() -> int:
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        answered = 0
        while time.monotonic() < until:
            writer.write(request)
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            left = int(head.partition(b"content-length: ")[2].split(b"\r")[0] or 0)
            while left:
                left -= len(await reader.read(min(left, 2**20)))
            answered += 1
        writer.close()
        return answered

    began = time.monotonic()
    answered = sum(await asyncio.gather(*(connection() for _ in range(CONNECTIONS))))
    return answered / (time.monotonic() - began)


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--winners", type=int, default=200_000)
    parser.add_argument("--folder", type=Path, help="keeps the databases")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        shipped, large = folder / "shipped.db", folder / f"winners-{options.winners}.db"
        if not shipped.exists():
            with Store.open(f"sqlite:///{shipped}", create=True) as store:
                million.take(store, servers.WINNERS)
        if not large.exists():
            million.fill(large, servers.WINNERS, options.winners)
        batch(shipped, unmeasured(10_000), "10,000 problems that were not measured")
        around = beside(million.sample(large, 600), 500)
        batch(large, around, f"500 beside {options.winners:,} winners")
        snapshot(shipped, "shipped winners")
        snapshot(large, f"{options.winners:,} winners")
    return 0


if __name__ == "__main__":
    sys.exit(main())
