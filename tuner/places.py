"""Where files lie: those that come with the program, and those that it keeps.

In a checkout (an editable install counts as one) the first are `configs/` and `migrations/`, and
what is kept is in `.state/`. In a wheel both folders are inside, under `tuner/files/`, where
`configs/wheel.py` puts them, and what is kept is in the user's data folder, as the XDG base
directory specification has it. All paths are absolute: nothing depends on the working folder.
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
"""The project's root, where the program runs from a checkout; else None."""


def shipped(name: str) -> Path:
    """A file or folder that comes with the program, by its name in a checkout.

    `shipped("configs/winners")`, say. That it is there is for the caller to see.
    """
    return (CHECKOUT or _PACKAGE / "files") / name


def state(environ: Mapping[str, str] | None = None) -> Path:
    """The folder of what the program keeps: database, packs, key. It may not be there yet."""
    return CHECKOUT / ".state" if CHECKOUT is not None else data_folder(environ)
