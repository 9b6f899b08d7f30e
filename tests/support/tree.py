"""This tree's files as they are now, whether committed or not."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.docs import ROOT


def files() -> list[str]:
    """Their names; what git ignores is left out."""
    listed = subprocess.check_output(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, text=True
    )
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def copy(folder: Path) -> Path:
    """Copy all of them into a folder; gives it back."""
    for name in files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())
    return folder
