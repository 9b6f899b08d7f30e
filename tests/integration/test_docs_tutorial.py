"""docs/tutorial.md: its commands run in their order without a GPU, and print what it shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.docs import ROOT, Session, steps, tools

PAGE = ROOT / "docs" / "tutorial.md"


@pytest.mark.long
def test_the_tutorial_works_as_printed(tmp_path: Path) -> None:
    environment = {
        **tools(),
        "GEMMSMITH_DATABASE": f"sqlite:///{tmp_path}/gemmsmith.db",
        "GEMMSMITH_PACKS": str(tmp_path / "packs"),
        "GEMMSMITH_DEVICE": "replay:nvidia-h200-132sm",
        "GEMMSMITH_WINNERS": str(ROOT / "configs" / "winners"),
        "GEMMSMITH_URL": "",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'client'}",
    }
    session = Session(tmp_path, environment, {})
    found = steps(PAGE)
    assert len(found) >= 11
    for step in found:
        session.run(step)
