"""A rank of a data-parallel training, in a process that test_ranks.py starts.

All ranks take the service's winners, multiply alike and average gradients. Told by JSON on stdin;
says on stdout, as JSON, what it chose, what it launched and what it ended with.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import gemmsmith
from gemmsmith import Client
from gemmsmith.ops.engine import source
from gemmsmith.ops.engine.in_use import current
from tests.gpu.support.counting import launches

STEPS = 6


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What a rank is told.

    Attributes:
        url: of the service.
        cache: its cache folder; ranks on one machine would share it, ranks of two do not.
        device: `cuda:N`, or `cpu` for stand-in kernels.
        backend: of torch.distributed.
        meeting: a file where ranks meet.
        sizes: M, N and K of the first layer.
        slug: device model of the winners.
    """

    rank: int
    world: int
    url: str
    cache: str
    device: str
    backend: str
    meeting: str
    sizes: tuple[int, int, int]
    slug: str


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What a rank found.

    Attributes:
        revision: of the snapshot that it chose from.
        choices: kernel and launch by problem.
        launched: kernels.
        parameters: hash of the trained parameters.
    """

    revision: str
    choices: dict[str, str]
    launched: int
    losses: list[float]
    parameters: str


def train(orders: Orders) -> Ended:
    """Train in step with the other ranks."""
    device = torch.device(orders.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        orders.backend,
        init_method=f"file://{orders.meeting}",
        rank=orders.rank,
        world_size=orders.world,
    )
    with (
        Client(orders.url, cache_dir=Path(orders.cache), retries=0, timeout=30) as client,
        launches() as launched,
    ):
        gemmsmith.use(client, device=orders.slug)
        model, losses = _train(orders, device)
    engine = current()
    assert engine is not None
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().float().cpu().numpy().tobytes())
    dist.destroy_process_group()
    return Ended(
        revision=engine._chooser.snapshot.revision,  # type: ignore[attr-defined]
        choices={
            str(plan.shape.problem): f"{plan.config.kernel.name} {plan.config.launch.key}"
            for plan in launched
        },
        launched=len(launched),
        losses=losses,
        parameters=found.hexdigest(),
    )


def _train(orders: Orders, device: torch.device) -> tuple[nn.Module, list[float]]:
    m, n, k = orders.sizes
    torch.manual_seed(3)  # the same parameters everywhere
    model = nn.Sequential(nn.Linear(k, n, bias=False), nn.Tanh(), nn.Linear(n, k, bias=False))
    model.to(device, torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    generator = torch.Generator().manual_seed(100 + orders.rank)  # and other data
    losses = []
    with gemmsmith.patch(model):
        for _ in range(STEPS):
            x = torch.randn(m, k, generator=generator).to(device, torch.bfloat16)
            loss = functional.mse_loss(model(x).float(), x.float())
            loss.backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                # In FP32: gloo has no bf16.
                total = parameter.grad.float()
                dist.all_reduce(total)
                parameter.grad.copy_(total / orders.world)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return model, losses


def main() -> int:
    """Do as stdin says."""
    told = json.load(sys.stdin)
    orders = Orders(**told | {"sizes": tuple(told["sizes"])})
    if orders.device == "cpu":
        from tests.support.stand_in import ENGINE

        source.Engine = ENGINE  # type: ignore[misc,assignment]
    sys.stdout.write(json.dumps(asdict(train(orders))) + "\n")
    return 0
