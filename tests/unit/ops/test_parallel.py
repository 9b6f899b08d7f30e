"""DDP, FSDP2, tensor parallelism and activation checkpointing train alike with winners.

Two processes on the host, with stand-in kernels.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.docs import ROOT
from tests.support.parallel_rank import MODELS, STEPS

FORWARD, WEIGHT, INPUT = 4, 4, 3
"""Products of a step: the first layer's input has no gradient."""

PER_STEP = FORWARD + WEIGHT + INPUT
AGAIN = 2
"""What a checkpoint computes again: each block's first layer, whose result the second one needs."""

EXPECTED = {
    "alone": {"all": PER_STEP + AGAIN, "model": PER_STEP + AGAIN},
    "ddp": {"all": PER_STEP, "model": PER_STEP},
    "ddp_with_bias": {"all": PER_STEP, "model": PER_STEP},
    "fsdp": {"all": PER_STEP + AGAIN, "model": PER_STEP + AGAIN},
    # `patch(model)` knows layers by their class and weights' sizes, and these have others.
    "fsdp_each_layer": {"all": PER_STEP, "model": 0},
    "tensor_parallel": {"all": PER_STEP, "model": 0},
    "tensor_parallel_with_bias": {"all": PER_STEP, "model": 0},
    # Without the compiled binding a checkpoint's forward products are left to torch.
    "alone_by_mode": {"all": 0, "model": PER_STEP + 2 * AGAIN},
}


@pytest.fixture(scope="module")
def ranks(pack: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks says."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = os.environ | {"GEMMSMITH_CACHE_DIR": str(folder / "cache")}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.parallel_rank"],
            cwd=ROOT, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for _ in range(2)
    ]  # fmt: skip
    try:
        for rank, process in enumerate(started):
            told = {"rank": rank, "world": 2, "meeting": str(folder / "meet"), "pack": str(pack)}
            assert process.stdin is not None
            process.stdin.write(json.dumps(told))
            process.stdin.close()
            process.stdin = None
        said = [process.communicate(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, errors) in zip(started, said, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(output) for output, _ in said]


@pytest.mark.long
def test_kernels_run_and_nothing_else_changes(ranks: list[dict[str, Any]]) -> None:
    assert {name for name in EXPECTED if "by_mode" not in name} == set(MODELS)
    for name, ways in EXPECTED.items():
        for how, products in ways.items():
            for rank in ranks:
                plain, tuned = rank[name]["torch"], rank[name][how]
                assert plain["runs"] == 0
                assert tuned["runs"] == products * STEPS, (name, how)
                assert tuned["losses"] == pytest.approx(plain["losses"], rel=5e-3), (name, how)
                assert tuned["weights"] == pytest.approx(plain["weights"], rel=1e-3), (name, how)
            # Ranks keep the same parameters; alone each trains its own.
            same = ranks[0][name][how]["weights"] == ranks[1][name][how]["weights"]
            assert same or name.startswith("alone"), (name, how)
