"""docs/finetuning.md: its commands for a machine without a GPU run and print what it shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import unchanged
from tests.support.docs import ROOT, Session, steps


@pytest.mark.long
def test_every_command_works_as_printed(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = {**unchanged.environment(tmp_path / "site"), "OMP_NUM_THREADS": "1"}
    session = Session(tmp_path, environment, {})
    commands, programs = [], []
    for step in steps(ROOT / "docs" / "finetuning.md"):
        if step.language == "python":
            programs.append(step)
            continue
        session.run(step)
        commands.append(step.text.split()[0])
    assert commands == ["python", "python", "gemmsmith", "grep"]
    for name in ("config.json", "adapter_config.json"):
        assert (tmp_path / "tuned" / name).is_file()
    (program,) = programs  # tests/unit/ops/test_fine_tuning.py adds this callback to the Trainer
    assert "trainer.add_callback(GemmsmithCallback(" in program.text
