"""`gemmsmith capture`: a program runs as it would without us, in however many processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gemmsmith.core.operation import of_dtype
from gemmsmith.core.problem import Problem
from gemmsmith.errors import InvalidProblem
from gemmsmith.program.captured import Captured
from service.cli import program
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


def test_products_are_captured_with_the_order_of_their_sums(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("")
    code = SCRIPT.format(end="x = torch.ones(32, 32).char(); torch._int_mm(x, x.t())")
    (tmp_path / "train.py").write_text(code)
    options = ("-o", "s.toml", "--numerics", "invariant")
    done = capture(tmp_path, "--", "python", "train.py", options=options)
    assert done.returncode == 0, done.stderr
    assert entries(tmp_path / "s.toml") == {
        (4, 8, 16, "tt", "bf16.sum_sequential"): 1,
        (32, 32, 32, "tn", "int8"): 1,
    }
    wrong = capture(tmp_path, "--", "python", "train.py", options=("--numerics", "x"))
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("error: numerics must be one of invariant")
    assert wrong.stdout == ""  # the program did not run


def test_products_of_every_kind_get_their_order() -> None:
    captured = Captured()
    plain = {
        "bf16": "bf16.sum_sequential",
        "bf16.then_bias_gelu": "bf16.then_bias_gelu.sum_sequential",
        "bf16.sum_split_4": "bf16.sum_split_4",
        "int8": "int8",
        "fp8_e4m3.scale_row": "fp8_e4m3.scale_row.sum_sequential",
        "bf16.then_dgelu_bgrad": None,  # its product without the epilogue is captured as well
        "tf32": None,
        "fp8_e4m3": None,
    }
    for calls, dtype in enumerate(plain, 1):
        captured.problems[Problem.of(of_dtype(dtype), 64, 64, 64)] = calls
    captured.skipped["float32 × float32"] = 7
    assert captured.with_numerics(None) is captured
    demanded = captured.with_numerics("invariant")
    assert {problem.dtype: calls for problem, calls in demanded.problems.items()} == {
        dtype: calls for calls, dtype in enumerate(plain.values(), 1) if dtype
    }
    assert demanded.skipped == {"float32 × float32": 7, "tf32": 7, "fp8_e4m3": 8}
    with pytest.raises(InvalidProblem, match="numerics must be one of invariant"):
        captured.with_numerics("x")


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
    # All steps are compiled; of the third nothing is captured.
    assert sorted(done.stdout.splitlines()) == [f"{rank} [True, True, True]" for rank in (0, 1)]
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


CHEAP = """
import sys, time
import torch
before = time.process_time()
from gemmsmith.startup import autocapture
from pathlib import Path
autocapture.begin(Path("."))
print(time.process_time() - before)
print(*sorted(name for name in sys.modules if name.startswith("gemmsmith.")))
print("msgspec" in sys.modules, "triton" in sys.modules, "torch._dynamo" in sys.modules)
"""


def test_a_process_that_multiplies_nothing_pays_little(tmp_path: Path) -> None:
    environment = unchanged.environment(tmp_path / "site")
    done = unchanged.run(["python", "-c", CHEAP], tmp_path, environment)
    seconds, ours, others = done.stdout.splitlines()
    assert float(seconds) <= 0.05
    assert ours.split() == [
        "gemmsmith.moved",
        "gemmsmith.program",
        *(f"gemmsmith.program.{name}" for name in ("built", "calls", "variables")),
        "gemmsmith.startup",
        "gemmsmith.startup.autocapture",
    ]
    assert others == "False False False"
    assert [one.name for one in tmp_path.glob("*.products.json")] == []


COMPILED = """
import sys, torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.act = nn.GELU(approximate="tanh")

    def forward(self, x):
        return self.down(self.act(self.up(x)))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x):
        q = x.detach().float().view(1, 1, 8, 16)
        attended = flex_attention(q, q, q).view(8, 16)
        return x + self.mlp(x) + torch.cond(x.sum() > 0, torch.sin, torch.cos, (attended,))

def main():
    torch.manual_seed(0)
    model = Model().bfloat16()
    types = {type(one) for one in model.modules()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if "compiled" in sys.argv:
        torch._dynamo.config.error_on_recompile = True
        model = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(4 if "trained" in sys.argv else 0):
        loss = model(torch.ones(8, 16).bfloat16()).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item(), types == {type(one) for one in model.modules()} or "compiled")
    with torch.no_grad():
        if "trained" not in sys.argv:
            print(model(torch.ones(8, 16).bfloat16()).sum().item())

main()
"""


@pytest.mark.long
@pytest.mark.parametrize("arguments", [("trained",), ("trained", "compiled"), (), ("compiled",)])
def test_a_compiled_program_is_not_compiled_anew(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """It prints the same, and lists what its layers could fuse, eager or compiled."""
    (tmp_path / "train.py").write_text(COMPILED)
    command = ["python", "-W", "ignore", "train.py", *arguments]
    environment = unchanged.environment(tmp_path / "site", OMP_NUM_THREADS="1")
    expected = unchanged.run(command, tmp_path, environment)
    assert expected.returncode == 0, expected.stderr
    done = capture(tmp_path, "--", *command, options=("--steps", "2", "-o", "s.toml"))
    assert (done.returncode, done.stdout) == (0, expected.stdout), done.stderr
    calls = {
        (one.m, one.n, one.k, one.layout.value, one.epilogue.value): one.calls
        for one in load(tmp_path / "s.toml").entries
    }
    if "trained" in arguments:
        assert calls[8, 32, 16, "tn", "bias_gelu_tanh_aux"] == calls[8, 32, 16, "tn", "bias"] == 2
        assert calls[8, 32, 16, "tt", "dgelu_tanh_bgrad"] == 2
    else:
        assert calls[8, 32, 16, "tn", "bias_gelu_tanh"] == calls[8, 32, 16, "tn", "bias"] == 1


GARBAGE = {
    "text": "(folder / 'a.products.json').write_text('no json')",
    "nothing": "(folder / 'a.products.json').touch()",
    "bytes": "(folder / 'a.products.json').write_bytes(os.urandom(99))",
    "half": "(folder / 'a.products.json').write_bytes(whole[:-9])",
    "other JSON": "(folder / 'a.products.json').write_text('[{}]')",
    "deep JSON": "(folder / 'a.products.json').write_text('[' * 99999)",
    "no problem": "(folder / 'a.products.json').write_bytes(whole.replace(b'4096', b'-1'))",
    "no count": "(folder / 'a.products.json').write_bytes(whole.replace(b'77', b'-77'))",
    "none of all": "(folder / 'a.products.json').write_bytes(whole.replace(b'77', b'0'))",
    "a folder": "(folder / 'a.products.json').mkdir()",
    "a pipe": "os.mkfifo(folder / 'a.products.json')",
    "a link to nothing": "(folder / 'a.products.json').symlink_to('no such file')",
    "a device": "(folder / 'a.products.json').symlink_to('/dev/zero')",
    "no UTF-8": "open(os.fsencode(folder) + b'/\\xff.products.json', 'w').close()",
    "another folder": "(folder / 'stopped').mkdir(); (folder / 'x.seen').mkdir()",
}
LEFT = """
import os, pathlib, shutil, sys
folder = pathlib.Path(os.environ["GEMMSMITH_CAPTURE"])
whole = (b'{"problems":[{"problem":{"m":4096,"n":64,"k":64},"calls":77}],"skipped":{}}')
if "whole" in sys.argv:
    (folder / "b.products.json").write_bytes(whole)
__GARBAGE__
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("garbage", GARBAGE)
def test_what_else_lies_in_the_folder_changes_no_status(
    tmp_path: Path,
    garbage: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", unchanged.environment(tmp_path / "site")["PYTHONPATH"])
    (tmp_path / "left.py").write_text(LEFT.replace("__GARBAGE__", GARBAGE[garbage]))
    command = [sys.executable, str(tmp_path / "left.py")]
    for arguments in (("0", "whole"), ("7", "whole"), ("0",)):
        ended = program.run_captured([*command, *arguments])
        assert ended.status == int(arguments[0])
        assert ended.captured.problems.total() == (77 if "whole" in arguments else 0)
        assert bool(ended.reason) is ("whole" not in arguments)
        assert len(ended.unseen) == (garbage != "another folder")


def test_a_suite_that_cannot_be_written_changes_no_failure(tmp_path: Path) -> None:
    (tmp_path / "left.py").write_text(LEFT.replace("__GARBAGE__", "os.mkdir('s.toml')"))
    for status in (7, 0):
        done = capture(tmp_path, "--", "python", "left.py", str(status), "whole")
        assert done.returncode == (status or 1)
        assert "s.toml" in done.stderr
        assert "Traceback" not in done.stderr
        (tmp_path / "s.toml").rmdir()


@pytest.mark.parametrize("end", ["shutil.rmtree(folder)", "folder.chmod(0); os.chdir('/')"])
def test_a_folder_that_is_gone_changes_no_status(tmp_path: Path, end: str) -> None:
    (tmp_path / "left.py").write_text(LEFT.replace("__GARBAGE__", end))
    done = capture(tmp_path, "--", "python", "left.py", "7")
    assert done.returncode == 7
    assert "Traceback" not in done.stderr


NOTHING = "error: nothing was captured: "
MULTIPLIES = "import torch; torch.ones(2, 3) @ torch.ones(3, 2)"
NO_KERNELS = "none of the 1 products that ran (1 of float32 × float32)"


@pytest.mark.parametrize(
    ("command", "status", "begins", "says"),
    [
        (("python", "-c", "pass"), 1, NOTHING, "none of the 1 Python processes has imported torch"),
        pytest.param(
            *(("python", "-c", "import torch"), 1, NOTHING, "no matrix product ran"),
            marks=pytest.mark.long,
        ),
        pytest.param(
            *(("python", "-c", MULTIPLIES), 1, NOTHING, NO_KERNELS), marks=pytest.mark.long
        ),
        (("true",), 1, NOTHING, "no Python ran that has gemmsmith installed"),
        (("bash", "-c", "exit 9"), 9, "", "nothing was captured"),
        (("nothing.py",), 2, "error: ", "no script nothing.py"),
        (("no-such-program", "x"), 2, "error: ", "no program no-such-program"),
    ],
)
def test_a_capture_of_nothing_says_why(
    tmp_path: Path, command: tuple[str, ...], status: int, begins: str, says: str
) -> None:
    done = capture(tmp_path, "--", *command)
    assert done.returncode == status
    assert done.stderr.startswith(begins)
    assert says in done.stderr
    assert not (tmp_path / "s.toml").exists()


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
