"""Programs that know nothing of gemmsmith, switched on by a variable: here with stand-in kernels."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from gemmsmith.bundle import write_bundle
from gemmsmith.problem import Layout, Problem
from tests.gpu.support.choosing import Ground
from tests.support import unchanged

SCRIPT = """
import os, sys, torch, torch.distributed as dist
from torch import nn

several = "RANK" in os.environ
if several:
    dist.init_process_group("gloo")
torch.manual_seed(3)
model = nn.Linear(16, 48, bias=False, dtype=torch.bfloat16)
data = torch.utils.data.DataLoader(
    torch.randn(96, 16).bfloat16(), batch_size=32, num_workers=int(os.environ.get("WORKERS", "0")),
    multiprocessing_context="spawn" if "WORKERS" in os.environ else None,
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def main():
    for x in data:
        x.requires_grad_()
        loss = model(x).float().square().mean()
        loss.backward()
        if several:
            for one in model.parameters():
                total = one.grad.float()
                dist.all_reduce(total)
                one.grad.copy_(total)
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss {loss.item():.6f}", flush=True)
    if several:
        dist.destroy_process_group()

if __name__ == "__main__":
    main()
    sys.exit(int(os.environ.get("ENDS_WITH", "0")))
"""
FORWARD = Problem(m=32, n=48, k=16)
INPUT = Problem(m=32, n=16, k=48, layout=Layout.TT)
WEIGHT = Problem(m=48, n=16, k=32, layout=Layout.NT)
STEP = (FORWARD, INPUT, WEIGHT)
TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node=2")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def baked(ground: Ground, path: Path, problems: Sequence[Problem]) -> Path:
    snapshot = ground.snapshot(problems)
    packs = [ground.store.get(name) for name in snapshot.packs()]
    write_bundle(path, snapshot, {pack.hash: pack.path for pack in packs if pack is not None})
    return path


def run(folder: Path, words: Sequence[str], value: str, **variables: str) -> CompletedProcess[str]:
    given = unchanged.environment(folder / "site", stand_in=True, GEMMSMITH=value, **variables)
    return unchanged.run([*words, "train.py"], folder, given)


def kinds(folder: Path, rank: int = 0) -> dict[str, int]:
    """How often each problem ran a kernel."""
    found = [line.rpartition(" ")[0] for line in unchanged.launched(folder / "site", rank)]
    return {problem: found.count(problem) for problem in sorted(set(found))}


@pytest.mark.long
def test_a_bundle_in_a_plain_program(ground: Ground, script: Path, tmp_path: Path) -> None:
    """Loaders' spawned processes import torch and do nothing; what has no winner is named."""
    bundle = baked(ground, tmp_path / "winners.gspack", [FORWARD, WEIGHT])
    done = run(tmp_path, [sys.executable], bundle.name, WORKERS="1", ENDS_WITH="5")
    assert done.returncode == 5, done.stderr
    assert kinds(tmp_path) == {str(FORWARD): 3, str(WEIGHT): 3}
    (worker,) = (tmp_path / "site").glob("worker-*")
    assert worker.read_text() == "torch gemmsmith.hook"
    assert done.stderr.splitlines() == [
        "gemmsmith: no winner is known for 1 products that matter:",
        "  32×16×48 bf16 tt: gemmsmith tune 32 16 48 --dtype bf16 --layout tt",
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("nothing.gspack", "there is no file"),
        ("train.py", "is not a whole bundle"),
        ("http://127.0.0.1:9", "no answer from http://127.0.0.1:9"),
        ("auto", "no winners are found"),
    ],
)
def test_a_value_that_makes_no_sense_is_one_warning(
    script: Path, tmp_path: Path, value: str, says: str
) -> None:
    home = {"XDG_DATA_HOME": str(tmp_path), "GEMMSMITH_CACHE_DIR": str(tmp_path / "cache")}
    done = run(tmp_path, [sys.executable], value, **home)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("loss ")
    (line,) = done.stderr.splitlines()
    assert line.startswith("GEMMSMITH does nothing, the program runs as without it: ")
    assert says in line
    assert kinds(tmp_path) == {}


@pytest.mark.long
def test_two_ranks_of_torchrun_run_what_rank_0_got(
    ground: Ground, script: Path, tmp_path: Path
) -> None:
    with ground.serving(tmp_path / "service", STEP) as (_, url):
        given = {"GEMMSMITH_CACHE_DIR": str(tmp_path / "cache")}
        done = run(tmp_path, TORCHRUN, url, **given)
    assert done.returncode == 0, done.stderr
    assert kinds(tmp_path, 0) == kinds(tmp_path, 1) == {str(one): 3 for one in sorted_(STEP)}
    one, other = done.stdout.splitlines()
    assert one.startswith("loss ")
    assert one == other  # the same data and parameters, and the same bits


def sorted_(problems: Sequence[Problem]) -> list[Problem]:
    return sorted(problems, key=str)
