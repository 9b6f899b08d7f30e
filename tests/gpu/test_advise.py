"""`gemmsmith advise` on a GPU: every rule sees its part of a program, and both forms run there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gemmsmith.program.observed import ObservedStep
from tests.support import unchanged
from tests.support.docs import ROOT
from tuner.advising.rules import RULES

torch = pytest.importorskip("torch")


def test_a_program_on_a_gpu_is_advised(tmp_path: Path) -> None:
    script = ROOT / "examples" / "plain_gpt.py"
    command = ["python", "-m", "service.cli", "advise", "--json", "--", "python", script]
    done = unchanged.run(command, tmp_path, unchanged.environment(tmp_path / "site"))
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["device"] == torch.cuda.get_device_name()
    lines = [*document["advised"], *document["not_advised"]]
    assert "activation" in {line["rule"] for line in lines}
    assert [line for line in lines if line["why_not"].startswith("it cannot be run")] == []


def test_both_forms_of_every_part_run_on_a_gpu(tmp_path: Path) -> None:
    script = ROOT / "examples" / "plain_gpt.py"
    environment = unchanged.environment(
        tmp_path / "site",
        GEMMSMITH_CAPTURE=str(tmp_path / "steps"),
        GEMMSMITH_CAPTURE_ADVISE="1",
        GEMMSMITH_CAPTURE_STEPS="3",
        GEMMSMITH_CAPTURE_STOP="1",
    )
    done = unchanged.run(["python", script], tmp_path, environment)
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "steps").glob("*.step.json")
    step = ObservedStep.parse(file.read_bytes())
    assert step.device == "cuda"
    parts = [part for rule in RULES for part in rule(step)]
    assert {part.rule for part in parts} == {
        *("optimizer", "activation", "padding", "logits", "tf32", "attention")
    }
    for part in parts:
        forms = part.forms(torch.device("cuda"))
        for before, after in zip(forms.before(), forms.after(), strict=True):
            off = (before.float() - after.float()).abs().max()
            assert off <= 0.05 * before.float().abs().max(), part.what
