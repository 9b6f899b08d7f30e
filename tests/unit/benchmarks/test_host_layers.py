"""The host's time of patched layers and models is measured beside torch's."""

from __future__ import annotations

import sys

import pytest

from benchmarks import host_layers
from benchmarks.session.core import ROOT


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def asked_for(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["host_layers", *arguments])


def test_a_layer_and_a_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run of all ways: each starts a process, which takes seconds."""
    asked_for(monkeypatch, "nanogpt", "GPT-NeoX", "--turns", "2", "--ways", *host_layers.WAYS)
    assert host_layers.main() == 0
    _, _, head, _, *rows = capsys.readouterr().out.splitlines()
    assert head == f"| | {' | '.join(host_layers.WAYS)} |"
    names = ["nanogpt", "nanogpt, with gradients", "GPT-NeoX", "GPT-NeoX, with gradients"]
    assert [row.split(" | ")[0] for row in rows] == [f"| {name}" for name in names]
    for row in rows:
        torchs, *ours = row.strip("| ").split(" | ")[1:]
        assert float(torchs) > 0
        assert len(ours) == len(host_layers.WAYS) - 1
        assert all(" × (" in cell for cell in ours)


def test_an_unknown_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked_for(monkeypatch, "GPT-9")
    with pytest.raises(SystemExit) as ended:
        host_layers.main()
    assert ended.value.code == 2
    assert "no layer or model is called GPT-9: torchtitan, " in capsys.readouterr().err
