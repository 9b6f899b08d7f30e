"""A rank of parallel trainings on the host, with stand-in kernels; test_parallel.py starts two.

Each kind of training runs with torch, then under `patch()` and under `patch(model)`, from the same
parameters on the same data. Reads its settings as JSON from stdin, and writes results to stdout.
"""

from __future__ import annotations

import ctypes
import json
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gemmsmith
from gemmsmith.ops.below.dispatch import Dispatch
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.in_use import install
from tests.support.stand_in import Chooser, Host, Packs

WIDTH, ROWS, STEPS = 32, 16, 3


@dataclass(frozen=True, kw_only=True)
class RankSettings:
    """The settings of a rank."""

    rank: int
    world: int
    meeting: str
    pack: str


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Losses and a parameter's sum after training, and the number of kernels that ran."""

    losses: list[float]
    weights: float
    runs: int


class Block(nn.Module):
    def __init__(self, bias: bool, checkpointed: bool) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=bias)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=bias)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointed:
            output: torch.Tensor = checkpoint(self._run, x, use_reentrant=False)
            return output
        return self._run(x)

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def blocks(*, bias: bool = False, checkpointed: bool = False) -> nn.Sequential:
    torch.manual_seed(11)
    return nn.Sequential(*(Block(bias, checkpointed) for _ in range(2)))


def alone(mesh: DeviceMesh) -> nn.Module:
    return blocks(checkpointed=True).to(torch.bfloat16)


def ddp(mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(blocks().to(torch.bfloat16))


def ddp_with_bias(mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(blocks(bias=True).to(torch.bfloat16))


def fsdp(mesh: DeviceMesh) -> nn.Module:
    """FSDP2 as in common use: FP32 parameters that are gathered and multiplied in bf16."""
    model = blocks(checkpointed=True)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def fsdp_each_layer(mesh: DeviceMesh) -> nn.Module:
    model = blocks(bias=True).to(torch.bfloat16)
    for block in model:
        for layer in (block.up, block.down):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(mesh: DeviceMesh) -> nn.Module:
    model = blocks().to(torch.bfloat16)
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def tensor_parallel_with_bias(mesh: DeviceMesh) -> nn.Module:
    model = blocks(bias=True).to(torch.bfloat16)
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


MODELS: dict[str, Callable[[DeviceMesh], nn.Module]] = {
    each.__name__: each
    for each in (
        alone, ddp, ddp_with_bias, fsdp, fsdp_each_layer, tensor_parallel,
        tensor_parallel_with_bias,
    )
}  # fmt: skip


def train(
    settings: RankSettings, mesh: DeviceMesh, name: str, how: str, runs: Callable[[], int]
) -> Trained:
    """Runs some steps of a model. Each rank has its own data unless the ranks share products."""
    model = MODELS[name](mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    shared = name.startswith("tensor_parallel")
    generator = torch.Generator().manual_seed(0 if shared else settings.rank)
    before, losses = runs(), []
    block: AbstractContextManager[object] = nullcontext()
    if how != "torch":
        block = gemmsmith.patch(model if how == "model" else None)
    with block:
        for _ in range(STEPS):
            x = torch.randn(ROWS, WIDTH, generator=generator).to(torch.bfloat16)
            loss = (model(x).float() - x.float().flip(0)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    weight = next(iter(model.parameters())).detach()
    whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
    return Trained(losses=losses, weights=whole.float().abs().sum().item(), runs=runs() - before)


def main() -> None:
    """Run every kind of training."""
    warnings.simplefilter("ignore")
    settings = RankSettings(**json.load(sys.stdin))
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{settings.meeting}",
        rank=settings.rank,
        world_size=settings.world,
    )
    mesh = init_device_mesh("cpu", (settings.world,))
    counter = ctypes.CDLL(settings.pack).runs_so_far
    counter.restype = ctypes.c_int64
    assert Dispatch.of("cpu", stream=lambda index: 77) is not None
    trained = {}
    for binding, names in ((True, tuple(MODELS)), (False, ("alone",))):
        host = Host()
        host.kind = "cpu" if binding else None  # replaces products below autograd, as on GPUs
        install(Engine(Chooser(), Packs(Path(settings.pack)), platform=host))
        for name in names:
            trained[name if binding else f"{name}_by_mode"] = {
                how: asdict(train(settings, mesh, name, how, lambda: int(counter())))
                for how in ("torch", "all", "model")
            }
    dist.destroy_process_group()
    json.dump(trained, sys.stdout)


if __name__ == "__main__":
    main()
