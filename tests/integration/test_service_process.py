"""The service as processes: what it imports, how it starts, how it stops."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx

from gemmsmith.core.problem import Problem
from service import identity
from tests.support.processes import SERVE, address, commands, serving
from tests.support.serving import new_settings, winner
from tuner.store import Store

NO_TORCH = """
import pathlib, sys
from gemmsmith.core.problem import Problem
from tests.support.serving import new_settings, promote, running, winner
settings = new_settings(pathlib.Path(sys.argv[1]))
promote(settings, winner(Problem(m=4096, n=4096, k=4096)))
with running(settings) as client:
    assert client.get("/best?m=4096&n=4096&k=4096").json()["match"] == "exact"
    assert client.post("/tune", json={"m": 8, "n": 8, "k": 8}).status_code == 202
    for path in ("/jobs/latest", "/results", "/devices", "/metrics", "/readyz", "/docs"):
        assert client.get(path).status_code == 200, path
    measured = sorted({"torch", "numpy"} & set(sys.modules))
    assert client.get("/best?m=4096&n=4096&k=8192").json()["match"] == "nearest"
    assert "torch" not in sys.modules
print(measured)
"""


def test_serving_imports_neither_torch_nor_numpy(tmp_path: Path) -> None:
    """NumPy only once somebody asks for what was not measured."""
    done = subprocess.run(
        [sys.executable, "-c", NO_TORCH, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_printed_lines_work_as_printed(tmp_path: Path) -> None:
    from tuner.exchange import export_winners

    made = new_settings(tmp_path)
    (tmp_path / "winners").mkdir(exist_ok=True)
    with Store.open(made.database, signer=identity.signer(made)) as store:
        store.promote(winner(Problem(m=4096, n=4096, k=4096)))
        export_winners(store, tmp_path / "winners" / "h200.jsonl")
    with serving(tmp_path) as (process, banner):
        lookup, tune, events = commands(banner)
        answer = json.loads(subprocess.check_output(lookup))
        assert answer["match"] == "exact"
        job = json.loads(subprocess.check_output(tune))
        assert job["state"] == "waiting"
        httpx.delete(f"{address(banner)}/jobs/{job['id']}")
        stream = subprocess.check_output(events, text=True)
        assert re.findall(r"^event: (\w+)$", stream, re.M) == ["created", "cancelled"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_an_open_stream_does_not_hold_up_the_end(tmp_path: Path) -> None:
    with serving(tmp_path) as (process, banner):
        _, tune, events = commands(banner)
        subprocess.check_output(tune)
        with subprocess.Popen(events, stdout=subprocess.PIPE, text=True) as stream:
            assert stream.stdout
            assert stream.stdout.readline() == "retry: 1000\n"
            said = ""
            while "event: created" not in said:  # the stream is open before the event is on it
                line = stream.stdout.readline()
                assert line, said
                said += line
            began = time.monotonic()
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
            assert time.monotonic() - began < 8
            assert "event: created" in said + stream.stdout.read()


def test_a_port_in_use_is_said_before_anything_is_done(tmp_path: Path) -> None:
    with serving(tmp_path) as (_, banner):
        second = tmp_path / "second"
        second.mkdir()
        environ = {
            **os.environ,
            "GEMMSMITH_PORT": address(banner).rpartition(":")[2],
            "GEMMSMITH_DATABASE": f"sqlite:///{second}/gemmsmith.db",
        }
        done = subprocess.run(
            [sys.executable, "-c", SERVE], env=environ, capture_output=True, text=True, timeout=60
        )
        assert done.returncode != 0
        assert "--port" in done.stderr
        assert not list(second.iterdir())


def test_answers_on_a_kept_connection_do_not_wait_for_acknowledgements(tmp_path: Path) -> None:
    with serving(tmp_path) as (_, banner):
        times = []
        with httpx.Client(base_url=address(banner)) as client:
            for _ in range(15):
                began = time.perf_counter()
                client.get("/healthz").raise_for_status()
                times.append(time.perf_counter() - began)
    assert sorted(times)[7] < 0.030  # a delayed acknowledgement takes 40 ms
