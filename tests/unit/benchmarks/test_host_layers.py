"""The host's time of patched layers and models is measured beside torch's."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.host_layers import WAYS, main
from benchmarks.session.core import ROOT


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.host_layers", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_layer_and_a_model() -> None:
    """A run of all ways: each takes seconds to begin."""
    done = run("nanogpt", "GPT-NeoX", "--turns", "2", "--ways", *WAYS)
    assert done.returncode == 0, done.stderr
    _, _, head, _, *rows = done.stdout.splitlines()
    assert head == f"| | {' | '.join(WAYS)} |"
    names = ["nanogpt", "nanogpt, with gradients", "GPT-NeoX", "GPT-NeoX, with gradients"]
    assert [row.split(" | ")[0] for row in rows] == [f"| {name}" for name in names]
    for row in rows:
        torchs, *ours = row.strip("| ").split(" | ")[1:]
        assert float(torchs) > 0
        assert len(ours) == len(WAYS) - 1
        assert all(" × (" in cell for cell in ours)


def test_an_unknown_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["host_layers", "GPT-9"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "no layer or model is called GPT-9: torchtitan, " in capsys.readouterr().err
