"""A user's whole path on a real GPU: serve, order, watch, look up, fetch the pack, run it."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import geometric_mean

import pytest

from gemmsmith import Client, Match, runtime
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import DType, Layout
from gemmsmith.runtime.launch import torch_dtype
from tests.support.compiled import kept
from tests.support.processes import serving

M, N, K = 384, 1536, 1024


@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP8_E4M3])
def test_from_an_order_to_the_winner_in_torch(tmp_path: Path, dtype: DType) -> None:
    import torch

    environment = {"GEMMSMITH_DEVICE": "cuda:0", "GEMMSMITH_PACKS": str(kept())}
    with serving(tmp_path, "worker", **environment) as (_, said):
        url = re.findall(r"http://[0-9.:]+", said)[0]
        with Client(url, cache_dir=tmp_path / "cache") as client:
            phases: list[str] = []
            job = client.tune(M, N, K, dtype=dtype, effort="quick")
            answer = job.wait(timeout=400, on_progress=lambda status: phases.append(status.phase))
            assert answer.served == client.best(M, N, K, dtype=dtype)
            assert "screen" in phases
            assert answer.match is Match.EXACT
            assert not answer.replayed
            assert answer.config is not None
            assert answer.config.pack is not None
            assert answer.speedup is not None
            lows = [each.speedup.ci_low for each in answer.regimes]
            gains = min(lows) > 1.0 and geometric_mean(lows) > (answer.power_penalty or 1.0)
            assert gains or answer.use.is_default
            # Where nobody knows what its power costs a program, a kernel that gains is not served.
            assert not gains or not answer.use.is_default or answer.power_penalty is None
            pack = client.pack(answer.config.pack)
    a = torch.randn(M, K, device="cuda").to(torch_dtype(Operation.of(dtype).a))
    w = torch.randn(N, K, device="cuda").to(torch_dtype(Operation.of(dtype).b))
    got = runtime.run(answer.config, a, w.t(), pack_path=pack)
    wanted = a.double() @ w.double().t()
    error = torch.linalg.norm(got.double() - wanted) / torch.linalg.norm(wanted)
    assert answer.config.kernel.layout is Layout.TN
    assert error < 1e-2
