"""The service in a separate process, as `gemmsmith serve` runs it."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.docs import ROOT

SHIPPED = {
    "GEMMSMITH_WINNERS": str(ROOT / "configs" / "winners"),
    "GEMMSMITH_SWEEPS": str(ROOT / "configs" / "sweeps"),
    "GEMMSMITH_DEVICE": "replay:nvidia-h200-132sm",
}
"""The settings of a service with the shipped winners and a worker on the recorded H200."""

SERVE = """
import sys
from service.cli.serve import serve
from service.settings import Settings
sys.exit(serve(Settings.load(), worker="worker" in sys.argv))
"""


def until(condition: Callable[[], bool], what: str, patience_s: float = 60.0) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def in_threads(*tasks: Callable[[], object]) -> None:
    """Runs all tasks at once, a thread for each, until all have ended."""
    threads = [threading.Thread(target=task) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def as_user(user: int, task: Callable[[], None], folder: Path | None = None) -> int:
    """Run the task in a fork as another user, in `folder`. Returns the exit status."""
    pid = os.fork()
    if pid == 0:
        status = 1
        signal.alarm(10)  # ends the fork even if it waits for something
        try:
            if folder is not None:
                os.chdir(folder)
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            task()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@contextmanager
def serving(
    folder: Path, *arguments: str, **environ: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`serve` in a separate process. Yields the process and its banner."""
    settings = {
        "GEMMSMITH_DATABASE": f"sqlite:///{folder}/state/gemmsmith.db",
        "GEMMSMITH_PACKS": f"{folder}/state/packs",
        "GEMMSMITH_WINNERS": f"{folder}/winners",
        "GEMMSMITH_SWEEPS": f"{folder}/sweeps",
        "GEMMSMITH_PORT": "0",
    }
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-u", "-c", SERVE, *arguments],
            env={**os.environ, **settings, **environ},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    assert process.stdout is not None
    try:
        banner = ""
        while "/events" not in banner:
            line = process.stdout.readline()
            assert line, (folder / "log").read_text()
            banner += line
        yield process, banner
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def address(banner: str) -> str:
    """The URL that the banner names."""
    (url,) = set(re.findall(r"http://[0-9.:]+", banner))
    return str(url)


def commands(banner: str) -> list[list[str]]:
    return [shlex.split(line) for line in banner.splitlines() if line.startswith("  curl ")]
