"""`make docs` builds the site without a warning, complete, and with nothing from another host."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.docs import ROOT


@pytest.mark.long
def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    site = tmp_path / "site"
    for page in (ROOT / "docs").glob("*.md"):
        built = site / ("index.html" if page.stem == "README" else f"{page.stem}/index.html")
        text = built.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"(https?:[^\"]+)", text)
        assert loaded == [], page.name
    library = (site / "library" / "index.html").read_text(encoding="utf-8")
    assert 'id="gemmsmith.http.client.Client.best"' in library
    assert 'id="gemmsmith.ops.engine.source.use"' in library
    assert (site / "project" / "benchmarks" / "results" / "regret.svg").is_file()
    assert "Add an operation" in (site / "CONTRIBUTING" / "index.html").read_text(encoding="utf-8")
