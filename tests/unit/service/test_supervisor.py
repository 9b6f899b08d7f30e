"""The worker's process is restarted, and stopped in order."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from service.settings import Settings
from service.worker.supervisor import WorkerSupervisor
from tests.support.processes import until

POLITE = """
import pathlib, signal, sys
def stop(*_):
    pathlib.Path(sys.argv[1], "handed back").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
pathlib.Path(sys.argv[1], "up").touch()
while True:
    signal.pause()
"""
STUBBORN = """
import pathlib, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1], "up").touch()
while True:
    signal.pause()
"""
FROZEN = """
import os, signal, socket, sys, time
line = socket.socket(fileno=0)
for _ in range(5):
    line.send(b".")
    time.sleep(0.1)
os.kill(os.getpid(), signal.SIGSTOP)
"""
ANSWERING = """
import time
from service.worker import process
process.BEAT_S = 0.1
process._answer_supervisor()
time.sleep(60)
"""
SHORT = "import os, sys; sys.exit(os.environ['GEMMSMITH_PORT'] != '8123')"


def test_a_worker_that_dies_is_started_again_with_growing_pauses(tmp_path: Path) -> None:
    supervisor = WorkerSupervisor(
        Settings(port=8123), [sys.executable, "-S", "-c", SHORT], first_pause_s=0.02
    )
    supervisor.start()
    until(lambda: supervisor.starts >= 4, "it is not started again")
    began = time.monotonic()
    supervisor.stop()  # in the middle of a pause
    assert time.monotonic() - began < 5
    assert supervisor.pid is None


def test_a_worker_that_is_frozen_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.worker.supervisor.BEAT_S", 0.1)
    supervisor = WorkerSupervisor(
        Settings(), [sys.executable, "-S", "-c", FROZEN], first_pause_s=0.02, silent_s=0.5
    )
    supervisor.start()
    until(lambda: supervisor.pid is not None, "it is not started")
    first = supervisor.pid
    until(lambda: supervisor.starts >= 2, "it is not replaced")
    assert not Path(f"/proc/{first}").exists()
    supervisor.stop()


def test_a_worker_says_that_it_runs_until_its_supervisor_ends() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker = subprocess.Popen([sys.executable, "-c", ANSWERING], stdin=theirs)
        theirs.close()
        ours.settimeout(20)
        assert [ours.recv(1) for _ in range(3)] == [b"."] * 3
        ours.close()
        assert worker.wait(20) == -signal.SIGTERM


def test_stop_lets_the_worker_finish(tmp_path: Path) -> None:
    supervisor = WorkerSupervisor(Settings(), [sys.executable, "-S", "-c", POLITE, str(tmp_path)])
    supervisor.start()
    until((tmp_path / "up").exists, "it is not up")
    assert supervisor.pid
    supervisor.stop()
    assert (tmp_path / "handed back").exists()
    assert supervisor.starts == 1


def test_stop_kills_a_worker_that_does_not_listen(tmp_path: Path) -> None:
    settings = Settings(stop_timeout_s=0.2)
    supervisor = WorkerSupervisor(settings, [sys.executable, "-S", "-c", STUBBORN, str(tmp_path)])
    supervisor.start()
    until((tmp_path / "up").exists, "it is not up")
    supervisor.stop()
    assert supervisor.pid is None
