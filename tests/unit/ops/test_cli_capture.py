"""`gemmsmith capture`: a program runs as it would without us, in however many processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gemmsmith.captured import Captured
from tests.support import unchanged
from tuner.suites import load

SCRIPT = """
import sys, torch, helper
if __name__ == "__main__":
    print(sys.argv)
    torch.ones(4, 16, dtype=torch.bfloat16) @ torch.ones(16, 8, dtype=torch.bfloat16)
    {end}
"""

RANKS = """
import os, subprocess, sys, torch

rank = int(os.environ.get("RANK", "0"))
layer = torch.nn.Linear(16, 8, bias=False, dtype=torch.bfloat16)
optimizer = torch.optim.SGD(layer.parameters())
layer = torch.compile(layer, backend="eager")
compiled = []
for step in range(3):
    out = layer(torch.ones(4 * (1 + rank), 16, dtype=torch.bfloat16))
    out.float().square().sum().backward()
    optimizer.step()
    compiled.append(torch._dynamo.utils.counters["frames"]["ok"] > 0)
print(rank, compiled)
if rank == 1:
    code = "import torch; a = torch.ones(3, 16).bfloat16(); a @ a.t()"
    subprocess.run([sys.executable, "-c", code], check=True)
"""


STOPPED = """
import torch
layer = torch.nn.Linear(16, 8, bias=False, dtype=torch.bfloat16)
optimizer = torch.optim.SGD(layer.parameters())
for step in range(3):
    layer(torch.ones(4, 16).bfloat16()).float().square().sum().backward()
    optimizer.step()
    print(step)
"""


def capture(
    folder: Path, *arguments: str, options: tuple[str, ...] = ("-o", "s.toml")
) -> subprocess.CompletedProcess[str]:
    command = ["python", "-m", "service.cli", "capture", *options, *arguments]
    environment = unchanged.environment(folder / "site", OMP_NUM_THREADS="1")
    return unchanged.run(command, folder, environment)


def entries(path: Path) -> dict[tuple[object, ...], int | None]:
    return {
        (one.m, one.n, one.k, one.layout.value, one.dtype): one.calls for one in load(path).entries
    }


@pytest.mark.parametrize(
    ("end", "status", "says"),
    [
        ("pass", 0, ""),
        pytest.param("sys.exit(7)", 7, "", marks=pytest.mark.long),
        pytest.param("sys.exit('no data')", 1, "no data", marks=pytest.mark.long),
        pytest.param("raise ValueError('broken')", 1, "ValueError: broken", marks=pytest.mark.long),
    ],
)
def test_status_arguments_and_suite(tmp_path: Path, end: str, status: int, says: str) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "helper.py").write_text("")
    (tmp_path / "code" / "train.py").write_text(SCRIPT.format(end=end))
    done = capture(tmp_path, "--", "python", "code/train.py", "--steps", "1", "-o", "x")
    assert done.returncode == status, done.stderr
    assert done.stdout.strip() == "['code/train.py', '--steps', '1', '-o', 'x']"
    assert says in done.stderr
    (entry,) = load(tmp_path / "s.toml").entries
    assert (entry.m, entry.n, entry.k, entry.layout) == (4, 8, 16, "tt")
    assert (entry.dtype, entry.calls) == ("bf16", 1)


def test_a_module(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("")
    (tmp_path / "train.py").write_text(SCRIPT.format(end="pass"))
    done = capture(tmp_path, "--", "python3", "-m", "train", "a")
    assert done.returncode == 0, done.stderr
    assert load(tmp_path / "s.toml").entries


@pytest.mark.long
def test_ranks_and_what_they_start_are_added_up(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RANKS)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    options = ("--steps", "2", "-o", "s.toml")
    done = capture(tmp_path, "--", "python", *launcher, "train.py", options=options)
    assert done.returncode == 0, done.stderr
    # Of the third step nothing is captured, and it is compiled.
    assert sorted(done.stdout.splitlines()) == [f"{rank} [False, False, True]" for rank in (0, 1)]
    assert entries(tmp_path / "s.toml") == {
        (4, 8, 16, "tn", "bf16"): 2,
        (8, 16, 4, "nt", "bf16"): 2,
        (8, 8, 16, "tn", "bf16"): 2,
        (8, 16, 8, "nt", "bf16"): 2,
        (3, 3, 16, "tn", "bf16"): 1,
    }
    assert "s.toml: 5 problems, 9 products of 3 processes" in done.stderr


@pytest.mark.long
def test_a_program_that_is_to_stop_ends_in_the_step(tmp_path: Path) -> None:
    environment = unchanged.environment(
        tmp_path / "site",
        GEMMSMITH_CAPTURE=str(tmp_path),
        GEMMSMITH_CAPTURE_STEPS="2",
        GEMMSMITH_CAPTURE_STOP="1",
    )
    done = unchanged.run(["python", "-c", STOPPED], tmp_path, environment)
    assert (done.returncode, done.stdout) == (0, "0\n")
    assert (tmp_path / "stopped").exists()
    (file,) = tmp_path.glob("*.products.json")
    assert sum(Captured.parse(file.read_bytes()).problems.values()) == 4


FORKED = """
import multiprocessing, torch

def product(rows):
    torch.ones(rows, 16).bfloat16() @ torch.ones(16, 8).bfloat16()

product(4)
child = multiprocessing.get_context("fork").Process(target=product, args=(5,))
child.start()
child.join()
"""


@pytest.mark.long
def test_what_a_forked_process_ran_is_its_own(tmp_path: Path) -> None:
    done = capture(tmp_path, "--", "python", "-c", FORKED)
    assert done.returncode == 0, done.stderr
    assert entries(tmp_path / "s.toml") == {
        (4, 8, 16, "tt", "bf16"): 1,
        (5, 8, 16, "tt", "bf16"): 1,
    }


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("pass", "none of the 1 Python processes has imported torch"),
        pytest.param("import torch", "no matrix product ran", marks=pytest.mark.long),
        pytest.param(
            "import torch; torch.ones(2, 3) @ torch.ones(3, 2)",
            "none of the 1 products that ran (1 of float32 × float32)",
            marks=pytest.mark.long,
        ),
    ],
)
def test_an_empty_capture_is_an_error(tmp_path: Path, code: str, says: str) -> None:
    done = capture(tmp_path, "--", "python", "-c", code)
    assert done.returncode == 1
    assert done.stderr.startswith("error: nothing was captured: ")
    assert says in done.stderr
    assert not (tmp_path / "s.toml").exists()


def test_a_program_that_is_no_python_or_fails(tmp_path: Path) -> None:
    done = capture(tmp_path, "--", "true")
    assert done.returncode == 1
    assert "no Python ran that has gemmsmith installed" in done.stderr
    done = capture(tmp_path, "--", "bash", "-c", "exit 9")
    assert done.returncode == 9
    assert "nothing was captured" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nothing.py",), "no script nothing.py"),
        (("no-such-program", "x"), "no program no-such-program"),
    ],
)
def test_wrong_commands(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    done = capture(tmp_path, "--", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert says in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_reach_the_program(tmp_path: Path, number: signal.Signals) -> None:
    script = f"trap 'echo got; exit 33' {number.value}; echo ready; while :; do sleep 0.05; done"
    with subprocess.Popen(
        [sys.executable, "-m", "service.cli", "capture", "--", "bash", "-c", script],
        cwd=tmp_path,
        env=unchanged.environment(tmp_path / "site"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.kill(process.pid, number)
        out, _ = process.communicate(timeout=60)
    assert (out, process.returncode) == ("got\n", 33)


def test_a_killed_program_ends_as_a_shell_says(tmp_path: Path) -> None:
    began = time.monotonic()
    done = capture(tmp_path, "--", "bash", "-c", "kill -KILL $$")
    assert done.returncode == 128 + signal.SIGKILL
    assert time.monotonic() - began < 60
