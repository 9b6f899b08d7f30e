"""docs/advise.md: its command runs and prints what the page shows, and its table has every rule."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support import unchanged
from tests.support.docs import ROOT, Session, steps
from tuner.advising import rules

PAGE = ROOT / "docs" / "advise.md"


def test_the_command_prints_what_the_page_shows(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = {**unchanged.environment(tmp_path / "site"), "OMP_NUM_THREADS": "1"}
    (step,) = steps(PAGE)
    printed = Session(tmp_path, environment, {}).run(step)
    # A line of code of the page is where the page says.
    place = re.search(r"plain_gpt.py:(\d+) NewGELU", printed)
    assert place is not None
    assert f"plain_gpt.py:{place[1]} NewGELU" in PAGE.read_text(encoding="utf-8")


def test_the_table_has_every_rule() -> None:
    named = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    source = Path(str(rules.__file__)).read_text(encoding="utf-8")
    assert named == re.findall(r'rule="(\w+)"', source)
    assert len(named) == len(rules.RULES)
