"""The processes of load measurements: the service, a bare route, and a writer.

    python -m benchmarks.servers bare BYTES        a FastAPI route that returns a constant
    python -m benchmarks.servers write URL         trials into a database, 1,000 a second

Service and bare route are each one uvicorn process, with the same settings.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import uvicorn
from fastapi import FastAPI, Response

from service.http.server import server_config
from service.settings import Settings
from tuner.exchange import read_winners
from tuner.store import Store
from tuner.trial import Phase, Trial, Winner

ROOT = Path(__file__).resolve().parent.parent
WINNERS = sorted((ROOT / "configs" / "winners").glob("nvidia-h200-132sm.*.jsonl"))
SWEEPS = ROOT / "configs" / "sweeps"

WORKER = "service.worker.process"
"""The module that `gemmsmith serve --worker` starts beside itself."""

TRIALS_A_SECOND = 1_000
_AT_ONCE = 50  # trials in a transaction, because each transaction waits for the disk


def shipped() -> list[Winner]:
    return [winner for path in WINNERS for winner in read_winners(path)]


@contextmanager
def service(database: Path, *arguments: str) -> Iterator[str]:
    """Run `gemmsmith serve` with a SQLite file, on a free port; yield its address."""
    with served(f"sqlite:///{database}", database.parent / "packs", *arguments) as url:
        yield url


@contextmanager
def served(database: str, packs: Path, *arguments: str) -> Iterator[str]:
    """Run `gemmsmith serve` with the database at a URL, on a free port; yield its address."""
    command = ["-m", "service.cli", "serve", "--port", "0", *arguments]
    environ = {
        "GEMMSMITH_DATABASE": database,
        "GEMMSMITH_PACKS": str(packs),
        "GEMMSMITH_DEVICE": "replay:",
    }
    with _process(command, environ) as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if "http://" in line)
        yield next(word for word in line.split() if word.startswith("http://")).rstrip(".,")


@contextmanager
def bare(size: int) -> Iterator[str]:
    """Run a FastAPI route that returns `size` bytes, on a free port; yield its address."""
    with _process(["-m", "benchmarks.servers", "bare", str(size)], {}) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()


@contextmanager
def writing(database: Path) -> Iterator[None]:
    """Run a process that adds trials, while the context is open."""
    command = ["-m", "benchmarks.servers", "write", f"sqlite:///{database}"]
    with _process(command, {}) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it has begun
        yield


@contextmanager
def standing_still() -> Iterator[None]:
    """Suspend workers and writers while the context is open; the servers go on.

    It must be open for less than a worker's lease, 60 s.
    """
    halted = [child for child in psutil.Process().children(recursive=True) if _is_busy(child)]
    for process in halted:
        process.suspend()
    try:
        yield
    finally:
        for process in halted:
            process.resume()


def _is_busy(process: psutil.Process) -> bool:
    """Whether a process is a worker or a writer."""
    try:
        command = process.cmdline()
    except psutil.NoSuchProcess:  # it has just ended
        return False
    return WORKER in command or "write" in command


@contextmanager
def _process(arguments: list[str], environ: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.terminate()


def _serve_bare(size: int) -> None:
    app = FastAPI()
    body = b"x" * size

    @app.get("/best")
    async def constant() -> Response:
        return Response(body, media_type="application/json")

    config = server_config(app, Settings.load({}), port=0)
    with config.bind_socket() as listener:
        listener.listen()  # connections wait until the server accepts them
        sys.stdout.write(f"http://127.0.0.1:{listener.getsockname()[1]}\n")
        sys.stdout.flush()
        uvicorn.Server(config).run(sockets=[listener])


def _write(url: str) -> None:
    winner = next(winner for winner in shipped() if winner.candidate is not None)
    assert winner.candidate is not None
    trial = Trial(
        problem=winner.problem,
        candidate=winner.candidate,
        device=winner.device,
        environment=winner.environment,
        phase=Phase.SCREEN,
        statistics=winner.statistics,
    )
    run = f"load-{os.getpid()}"
    with Store.open(url) as store:
        due, written = time.monotonic(), 0
        while True:
            jobs = [f"{run}-{number}" for number in range(written, written + _AT_ONCE)]
            store.add_trials([replace(trial, job=job) for job in jobs])
            if not written:
                sys.stdout.write("writing\n")
                sys.stdout.flush()
            written += _AT_ONCE
            now = time.monotonic()
            due = max(
                due + _AT_ONCE / TRIALS_A_SECOND, now
            )  # a late transaction is not caught up on
            time.sleep(due - now)


if __name__ == "__main__":
    command, value = sys.argv[1:]
    if command == "bare":
        _serve_bare(int(value))
    else:
        _write(value)
