"""A script that knows nothing of gemmsmith, on a GPU: one variable, and its products run winners.

On the host, with stand-in kernels: tests/unit/ops/test_unchanged.py.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from gemmsmith.core.problem import Layout, Problem
from gemmsmith.winners.bundle import write_bundle
from tests.gpu.support.choosing import Ground
from tests.gpu.test_training import ground
from tests.support import unchanged

__all__ = ["ground"]

M, N, K = 528, 784, 1056
SCRIPT = f"""
import os, torch, torch.distributed as dist
from torch import nn

rank, several = int(os.environ.get("LOCAL_RANK", "0")), "RANK" in os.environ
if several:
    dist.init_process_group("nccl")
torch.cuda.set_device(rank)  # after the group: no collective of ours may have used a device
torch.manual_seed(3)
model = nn.Linear({K}, {N}, bias=False).cuda().bfloat16()
if several:
    model = nn.parallel.DistributedDataParallel(model, device_ids=[rank])
if os.environ.get("COMPILES") == "1":
    model = torch.compile(model)
x = torch.randn({M}, {K}, device="cuda").bfloat16().requires_grad_()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    loss = model(x).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"loss {{loss.item():.9f}}", flush=True)
if several:
    dist.destroy_process_group()
"""
STEP = (
    Problem(m=M, n=N, k=K),
    Problem(m=M, n=K, k=N, layout=Layout.TT),
    Problem(m=N, n=K, k=M, layout=Layout.NT),
)


def run(ground: Ground, folder: Path, words: Sequence[str], **variables: str) -> list[str]:
    """Lines that the script prints, with winners of all of its products."""
    snapshot = ground.snapshot(STEP)
    packs = [ground.store.get(name) for name in snapshot.packs()]
    bundle = folder / "winners.gspack"
    write_bundle(bundle, snapshot, {pack.hash: pack.path for pack in packs if pack is not None})
    (folder / "train.py").write_text(SCRIPT)
    given = unchanged.environment(
        folder / "site", counting=True, GEMMSMITH=str(bundle), **variables
    )
    done = unchanged.run([*words, "train.py"], folder, given, within_s=600)
    assert done.returncode == 0, done.stderr
    assert "GEMMSMITH does nothing" not in done.stderr
    return done.stdout.splitlines()


def problems(folder: Path, rank: int = 0) -> Counter[str]:
    lines = unchanged.launched(folder / "site", rank)
    return Counter(line.rpartition(" ")[0] for line in lines)


@pytest.mark.parametrize("compiles", ["0", "1"])
def test_one_process(ground: Ground, tmp_path: Path, compiles: str) -> None:
    run(ground, tmp_path, [sys.executable], COMPILES=compiles)
    assert set(problems(tmp_path)) == {str(one) for one in STEP}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_ranks_agree_without_a_collective_on_their_devices(
    ground: Ground, tmp_path: Path
) -> None:
    one, other = run(ground, tmp_path, ["torchrun", "--standalone", "--nproc-per-node=2"])
    assert one == other
    assert problems(tmp_path, 0) == problems(tmp_path, 1)
    assert set(problems(tmp_path)) == {str(one) for one in STEP}


def test_a_process_that_uses_no_gpu_stays_without_a_context(tmp_path: Path) -> None:
    code = (
        "import sys, torch; torch.ones(2) + 1;"
        "print(torch.cuda.is_initialized(), 'gemmsmith.ops' in sys.modules)"
    )
    given = unchanged.environment(tmp_path / "site", GEMMSMITH="auto")
    done = unchanged.run(["python", "-c", code], tmp_path, given)
    assert done.stdout.split() == ["False", "False"], done.stderr
