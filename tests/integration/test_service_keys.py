"""A service that takes keys, as processes: refused without any, then the printed lines work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx

from tests.support.processes import SERVE, address, serving


def gemmsmith(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command, in a process of its own, on the service's database."""
    return subprocess.run(
        [sys.executable, "-m", "service.cli", *arguments],
        env={**os.environ, "GEMMSMITH_DATABASE": f"sqlite:///{folder}/state/gemmsmith.db"},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_without_a_key_nothing_is_served_to_the_world(tmp_path: Path) -> None:
    environ = {
        **os.environ,
        "GEMMSMITH_DATABASE": f"sqlite:///{tmp_path}/g.db",
        "GEMMSMITH_PACKS": f"{tmp_path}/packs",
        "GEMMSMITH_WINNERS": f"{tmp_path}/winners",
        "GEMMSMITH_HOST": "0.0.0.0",
        "GEMMSMITH_PORT": "0",
    }
    done = subprocess.run(
        [sys.executable, "-c", SERVE], env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0
    assert "gemmsmith keys create NAME --scope admin" in done.stderr
    assert done.stdout == ""


def test_the_printed_lines_work_with_a_key_until_it_is_revoked(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    key = gemmsmith(tmp_path, "keys", "create", "ann", "--scope", "tune").stdout.strip()
    with serving(tmp_path, GEMMSMITH_HOST="0.0.0.0") as (_, banner):
        banner = banner.replace("0.0.0.0", "127.0.0.1")
        lines = [line for line in banner.splitlines() if line.startswith("  curl ")]
        assert len(lines) == 3
        answers = [
            json.loads(
                subprocess.check_output(
                    ["bash", "-c", line], env={**os.environ, "GEMMSMITH_API_KEY": given}
                )
            )
            for line in lines[:2]
            for given in (key, "gsk_wrong")
        ]
        # Nothing is tuned here: a proposal, then an order; and twice a refusal.
        assert [answer.get("status") for answer in answers] == [404, 401, None, 401]
        assert answers[2]["state"] == "waiting"
        with httpx.Client(base_url=address(banner)) as http:
            http.headers["Authorization"] = f"Bearer {key}"
            assert http.get("/jobs", headers={"Host": "any.example"}).status_code == 200
            assert "is revoked" in gemmsmith(tmp_path, "keys", "revoke", "ann").stdout
            began = time.monotonic()
            while http.get("/jobs").status_code == 200:
                assert time.monotonic() - began < 5  # 2 s, and more on a loaded machine
                time.sleep(0.05)
    assert key not in (tmp_path / "log").read_text()
