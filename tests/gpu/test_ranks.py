"""Two ranks of one job, each a process with a GPU, one with a warm cache and one with none.

With a single GPU both share it, and gloo stands in for NCCL: figures say which it was. On the host,
with stand-in kernels: tests/unit/ops/test_ranks.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from gemmsmith import Client, Packs
from gemmsmith.core.problem import Layout, Problem
from tests.gpu.support.choosing import Ground
from tests.gpu.support.rank import STEPS, Ended, Orders
from tests.gpu.test_training import ground

__all__ = ["ground"]

ROOT = Path(__file__).resolve().parents[2]
ALONE = """
import sys
for absent in ("fastapi", "pydantic", "sqlalchemy", "tuner", "service", "cutlass_library"):
    sys.modules[absent] = None  # as if it were not installed
from tests.gpu.support.rank import main
sys.exit(main())
"""


def places(ground: Ground) -> tuple[list[str], str]:
    """The two devices, and the backend that joins them."""
    if ground.device.type == "cpu":
        return ["cpu", "cpu"], "gloo"
    if torch.cuda.device_count() < 2:
        return ["cuda:0", "cuda:0"], "gloo"
    return ["cuda:0", "cuda:1"], "nccl"


def on_two_ranks(ground: Ground, folder: Path, url: str) -> list[Ended]:
    devices, backend = places(ground)
    started = [
        (
            Orders(
                rank=rank,
                world=len(devices),
                url=url,
                cache=str(folder / f"cache-{rank}"),
                device=device,
                backend=backend,
                meeting=str(folder / "meeting"),
                sizes=ground.sizes,
                slug=ground.model.slug,
            ),
            subprocess.Popen(
                [sys.executable, "-c", ALONE],
                cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True,
            ),
        )
        for rank, device in enumerate(devices)
    ]  # fmt: skip
    ended = []
    try:
        for orders, process in started:
            assert process.stdin is not None
            process.stdin.write(json.dumps(asdict(orders)))
            process.stdin.close()
            process.stdin = None
        for _, process in started:
            out, errors = process.communicate(timeout=240)
            assert process.returncode == 0, errors
            ended.append(Ended(**json.loads(out.splitlines()[-1])))
    finally:
        for _, process in started:
            process.kill()
            process.wait()
    return ended


@pytest.mark.parametrize("warm", [0, 1])
def test_a_warm_and_a_cold_rank_choose_and_compute_alike(
    ground: Ground,
    tmp_path: Path,
    warm: int,
    record_property: Callable[[str, object], None],
) -> None:
    check(ground, tmp_path, warm)
    record_property("devices", places(ground)[0])


def check(ground: Ground, folder: Path, warm: int) -> None:
    """Train on two ranks, rank `warm` with everything in its cache: they choose and end alike."""
    m, n, k = ground.sizes
    problems = [
        Problem(m=m, n=n, k=k),
        Problem(m=m, n=k, k=n),
        Problem(m=m, n=n, k=k, layout=Layout.TT),
        Problem(m=k, n=n, k=m, layout=Layout.NT),
        Problem(m=n, n=k, k=m, layout=Layout.NT),
    ]
    with ground.serving(folder, problems) as (_, url):
        with Client(url, cache_dir=folder / f"cache-{warm}") as client:
            snapshot = client.snapshot(ground.model.slug)
            packs = Packs.of(client, signed=lambda: snapshot)
            for name in snapshot.packs():
                packs.path(name)
        one, other = on_two_ranks(ground, folder, url)
    assert one.revision == other.revision == snapshot.revision
    assert one.choices == other.choices
    assert set(one.choices) == {str(problem) for problem in problems}
    assert one.launched == other.launched == STEPS * len(problems)
    assert one.parameters == other.parameters
    assert one.losses != other.losses  # of other data
    assert sum(one.losses[-2:]) < sum(one.losses[:2])
