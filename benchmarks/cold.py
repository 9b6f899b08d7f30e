"""What nobody asked before, and what many ask at once: cold batches, and snapshots of many winners.

    python -m benchmarks.cold --winners 200000 --folder FOLDER

Each measurement has a service process of its own; memory is the process's peak above what it had
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
    """Random problems, mostly far from any that has a winner."""
    draw = random.Random(1)
    found: dict[Problem, None] = {}
    while len(found) < count:
        dtype = draw.choice(("bf16", "fp16", "fp8_e4m3"))
        layout = Layout.TN if dtype.startswith("fp8") else draw.choice([*Layout])
        m, n, k = (max(1, int(2 ** draw.uniform(low, 14)) // 8) * 8 for low in (3, 4, 4))
        found[Problem(m=m, n=n, k=k, dtype=dtype, layout=layout)] = None
    return list(found)


def beside(known: Sequence[Problem], count: int) -> list[Problem]:
    """Problems next to those that have winners."""
    draw = random.Random(2)
    sizes = ({"m": each.m + 8 * draw.randrange(1, 8), "n": each.n + 8} for each in known)
    made = (
        Problem(**size, k=each.k, batch=each.batch, dtype=each.dtype, layout=each.layout)
        for each, size in zip(known, sizes, strict=True)
    )
    return list(dict.fromkeys(made))[:count]


@contextmanager
def measured(database: Path) -> Iterator[tuple[str, Path]]:
    """A service, ready and idle, and its process's folder in /proc."""
    with servers.service(database) as url:
        httpx.get(f"{url}/readyz").raise_for_status()
        me = os.getpid()
        [child] = Path(f"/proc/{me}/task/{me}/children").read_text().split()
        process, before = Path("/proc", child), -1.0
        while cpu_s(process) - before > 0.1:  # of many winners a chart is drawn
            before = cpu_s(process)
            time.sleep(1.0)
        yield url, process


def peak_mb(process: Path) -> float:
    """The most memory that the process ever had."""
    lines = (process / "status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def cpu_s(process: Path) -> float:
    """Seconds of a processor that it has had."""
    user, system = (process / "stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def batch(database: Path, problems: Sequence[Problem], what: str) -> None:
    """One cold batch, the first that the service is asked for."""
    body = msgspec.json.encode({"problems": problems})
    with measured(database) as (url, process):
        httpx.get(f"{url}/best?m=7&n=999&k=77").raise_for_status()  # loads what predicts
        before, began = cpu_s(process), time.perf_counter()
        headers = {"Content-Type": "application/json"}
        reply = httpx.post(f"{url}/best:batch", content=body, headers=headers, timeout=600)
        seconds = time.perf_counter() - began
        nearest = reply.text.count('"match":"nearest"')
        print(
            f"{seconds:8.2f} s  {cpu_s(process) - before:6.2f} s of CPU  {what}: {nearest} nearest"
        )


def snapshot(database: Path, what: str) -> None:
    """The first snapshot, and then requests without end."""
    with measured(database) as (url, process):
        idle, before, began = peak_mb(process), cpu_s(process), time.perf_counter()
        with httpx.stream("GET", f"{url}/snapshot", headers=PLAIN, timeout=600) as reply:
            size = sum(map(len, reply.iter_raw()))
        seconds, cpu = time.perf_counter() - began, cpu_s(process) - before
        tag = reply.headers["etag"]
        more = peak_mb(process) - idle
        print(
            f"{seconds:8.2f} s  {cpu:6.2f} s of CPU  {more:6.0f} MB  first {what}, {size:,} bytes"
        )
        asked = {
            "304": {"If-None-Match": tag},
            "gzip": {"Accept-Encoding": "gzip"},
            "plain": PLAIN,
        }
        for name, headers in asked.items():
            httpx.get(f"{url}/snapshot", headers=headers, timeout=600)
            before = cpu_s(process)
            rate = asyncio.run(load(url, headers))
            used = (cpu_s(process) - before) / SECONDS
            print(f"{rate:8.1f} /s  {used:6.0%} of a CPU  {what}, {name}")
        print(f"{peak_mb(process) - idle:8.0f} MB in the end")


PLAIN = {"Accept-Encoding": "identity"}


async def load(url: str, headers: dict[str, str]) -> float:
    """Answers a second to `GET /snapshot`."""
    where = urlsplit(url)
    lines = ["GET /snapshot HTTP/1.1", f"Host: {where.netloc}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    request = "\r\n".join([*lines, "", ""]).encode()
    until = time.monotonic() + SECONDS

    async def one() -> int:
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
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
    answered = sum(await asyncio.gather(*(one() for _ in range(CONNECTIONS))))
    return answered / (time.monotonic() - began)


def main() -> int:
    """Print what was measured."""
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
        batch(shipped, unmeasured(10_000), "10,000 problems nobody measured")
        around = beside(million.sample(large, 600), 500)
        batch(large, around, f"500 beside {options.winners:,} winners")
        snapshot(shipped, "shipped winners")
        snapshot(large, f"{options.winners:,} winners")
    return 0


if __name__ == "__main__":
    sys.exit(main())
