"""Where files are: those that come with the program, and those that it writes.

In a checkout (an editable install counts as one) the first are in `configs/` and `migrations/`, the
second in `.state/`. A wheel contains both folders under `tuner/files/`, where `configs/wheel.py`
puts them; files that the program writes are then in the user's data folder, by the XDG base
directory specification. All paths are absolute: nothing depends on the working folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gemmsmith.files import data_folder

_PACKAGE = Path(__file__).resolve().parent


def _checkout() -> Path | None:
    root = _PACKAGE.parent
    return root if (root / "pyproject.toml").is_file() and (root / "migrations").is_dir() else None


CHECKOUT = _checkout()
"""The project's root if the program runs from a checkout; else None."""


def shipped(name: str) -> Path:
    """A file or folder that comes with the program, by its name in a checkout.

    `shipped("configs/winners")`, say. The caller checks whether it exists.
    """
    return (CHECKOUT or _PACKAGE / "files") / name


def state(environ: Mapping[str, str] | None = None) -> Path:
    """The folder of the database, the packs and the key. It may not exist yet."""
    return CHECKOUT / ".state" if CHECKOUT is not None else data_folder(environ)
