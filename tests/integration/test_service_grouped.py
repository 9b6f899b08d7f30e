"""A grouped problem on the recorded GPU, over HTTP: unknown, tuned, served."""

from __future__ import annotations

import shutil
from pathlib import Path

import httpx

from tests.support.processes import address, serving, until
from tests.support.shipped import SWEEPS
from tuner.devices.recording import SUFFIX

SWEEP = "nvidia-h200-132sm.bf16.groups"
FEW_TOKENS = {"m": 512, "n": 28672, "k": 4096, "grouping": "rows", "groups": 8}


def test_experts_products_are_tuned_and_served(tmp_path: Path) -> None:
    (tmp_path / "sweeps").mkdir()
    shutil.copy(SWEEPS / f"{SWEEP}{SUFFIX}", tmp_path / "sweeps")
    with (
        serving(tmp_path, "worker", GEMMSMITH_DEVICE=f"replay:{SWEEP}") as (_, banner),
        httpx.Client(base_url=address(banner), timeout=30) as client,
    ):
        assert client.get("/best", params=FEW_TOKENS | {"exact": "true"}).status_code == 404
        accepted = client.post("/tune", json=FEW_TOKENS)
        assert accepted.status_code == 202, accepted.text
        place = accepted.headers["Location"]

        def ended() -> bool:
            return client.get(place).json()["state"] in ("done", "failed")

        until(ended, "the job ends")
        assert client.get(place).json()["state"] == "done", client.get(place).text
        answer = client.get("/best", params=FEW_TOKENS)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert (body["match"], body["use"]) == ("exact", "cutlass")
    assert body["problem"]["dtype"] == "bf16.group_rows"
    assert body["speedup"]["ci_low"] > 1.2
