"""The current files of this tree, committed or not."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.docs import ROOT


def files() -> list[str]:
    """The names of all files, except those that git ignores."""
    listed = subprocess.check_output(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, text=True
    )
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def copy(folder: Path) -> Path:
    """Copy all files into a folder. Returns the folder."""
    for name in files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())
    return folder
