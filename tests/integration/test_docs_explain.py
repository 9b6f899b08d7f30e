"""docs/explain.md: its commands print what the page shows, for the shipped winners."""

from __future__ import annotations

from pathlib import Path

from tests.support.docs import ROOT, Session, steps, tools
from tests.support.serving import new_settings
from tests.support.shipped import TRUSTED, shipped_files
from tuner.exchange import import_winners
from tuner.store import Store

PAGE = ROOT / "docs" / "explain.md"


def test_every_command_prints_what_the_page_shows(tmp_path: Path) -> None:
    settings = new_settings(tmp_path)
    with Store.open(settings.database) as store:
        for file in shipped_files():
            if file.name.startswith("nvidia-h200"):
                import_winners(store, file, TRUSTED)
    session = Session(tmp_path, {**settings.environment(), **tools(), "GEMMSMITH_URL": ""}, {})
    commands = steps(PAGE)
    assert len(commands) == 7
    for step in commands:
        printed = session.run(step)
        for line in step.shown.splitlines():
            # Figures too, not only their form.
            if line.startswith(("tiles", "waves", "SMs busy", "moved at L2")):
                assert " ".join(line.split()) in " ".join(printed.split()), (step.where, line)
