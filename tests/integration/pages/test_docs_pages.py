"""docs/pages.md: its pictures are there, small, and all that there are; its searches work."""

from __future__ import annotations

import re
from pathlib import Path

from service.pages.search import parse

DOCS = Path(__file__).parents[3] / "docs"
TEXT = (DOCS / "pages.md").read_text()


def test_the_pictures_are_there_and_small() -> None:
    named = re.findall(r"!\[([^]]+)\]\((images/[^)]+)\)", TEXT)
    here = {str(path.relative_to(DOCS)) for path in (DOCS / "images").iterdir()}
    assert {name for _, name in named} <= here
    for words, name in named:
        assert len(words) > 10
        content = (DOCS / name).read_bytes()
        assert content.startswith(b"\x89PNG")
        assert 1_000 < len(content) < 200_000


def test_the_searches_can_be_read() -> None:
    rows = [line.split("|")[1] for line in TEXT.splitlines() if line.startswith("| `")]
    searches = [found for row in rows for found in re.findall(r"`([^`]+)`", row)]
    assert len(searches) == 8
    for search in searches:
        parse(search)
