"""Ctrl-C is one line and status 130, whenever it comes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

WRITING = """
import os, signal, sys, threading
from service.cli.session import stop_flag
with stop_flag() as stop:
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    sys.stderr.write("x" * 1_000_000 + "\\n")  # more than a pipe holds: the signal comes within it
    sys.stderr.flush()
    print("stopped" if stop() else "not stopped")
"""


def test_a_stop_within_a_write_is_said() -> None:
    environ = {name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(
        [sys.executable, "-c", WRITING],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(2.0)  # nothing reads yet
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors[-2000:]
    assert output == "stopped\n"
    assert "stopping after the current candidate; once more to stop at once\n" in errors
    assert errors.count("x") == 1_000_000
    assert "Traceback" not in errors


IMPORTING = """
import os, signal, sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
sys.argv = ["gemmsmith", *{arguments!r}]
from service.cli.__main__ import main
main()
"""
AT_EXIT = """
import atexit, os, signal, sys
sys.argv = ["gemmsmith", "--version"]
from service.cli.__main__ import main
atexit.register(os.kill, os.getpid(), signal.SIGINT)
main()
"""


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("service.cli.main", ["--version"]),
        ("service.cli.best", ["--version"]),  # in the middle of the imports
        ("tuner.store.models", ["results", "--limit", "1"]),  # within the command
    ],
)
def test_an_interrupt_within_an_import_is_one_line(
    name: str, arguments: list[str], tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTING.format(name=name, arguments=arguments)],
        env={**os.environ, "GEMMSMITH_DATABASE": f"sqlite:///{tmp_path}/g.db"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (130, "error: interrupted\n")


def test_an_interrupt_at_the_very_end_prints_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")
