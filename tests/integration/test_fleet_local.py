"""`gemmsmith fleet --address local`: only its user reaches the Ray cluster that it starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.processes import until
from tests.support.serving import new_settings
from tests.support.shipped import DEVICE, SWEEPS

pytestmark = pytest.mark.long


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[tuple[psutil.Process, Path, Path]]:
    """A fleet of one recorded GPU, which works, under a umask that denies nothing to others.

    Its process, its home and its folder for temporary files.
    """
    settings = new_settings(tmp_path, sweeps=SWEEPS, device=DEVICE)
    home, log = tmp_path / "home", tmp_path / "log"
    home.mkdir()
    # A short path, because sockets lie below it.
    with tempfile.TemporaryDirectory() as temporary:
        environ = {name: value for name, value in os.environ.items() if "RAY" not in name}
        environ |= {**settings.environment(), "HOME": str(home), "TMPDIR": temporary}
        command = [sys.executable, "-m", "service.cli", "fleet", "--address", "local"]
        with (
            log.open("w") as output,
            subprocess.Popen(command, env=environ, stdout=output, stderr=output, umask=0) as ours,
        ):
            try:
                until(lambda: "gpus=1 of=1" in " ".join(log.read_text().split()), "ready", 120)
                yield psutil.Process(ours.pid), home, Path(temporary)
            finally:
                ours.send_signal(signal.SIGTERM)
                ours.wait(60)
        assert ours.returncode == 0, log.read_text()
        assert not list(Path(temporary).iterdir())


def test_others_reach_neither_its_ports_nor_its_token_nor_its_files(
    fleet: tuple[psutil.Process, Path, Path],
) -> None:
    process, home, temporary = fleet
    processes = [process, *process.children(recursive=True)]
    listening = {
        connection.laddr.ip.removeprefix("::ffff:")
        for process in processes
        for connection in process.net_connections()
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}
    token = next(
        process.environ()["RAY_AUTH_TOKEN"] for process in processes if "raylet" in process.name()
    )
    assert not any(token in word for process in processes for word in process.cmdline())
    assert list(home.iterdir()) == []  # no file has the token
    (folder,) = temporary.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
