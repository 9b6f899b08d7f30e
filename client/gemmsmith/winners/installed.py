"""Kernel packs that were installed with pip: the wheels `gemmsmith-kernels-…`.

Each is a folder of the namespace `gemmsmith_kernels`, named after an architecture, with packs
under their hashes (`<hash>.so`) and what each holds (`<hash>.json`). Nothing is imported from
there, and a pack from there is believed no more than one from elsewhere.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.util import find_spec
from pathlib import Path

NAMESPACE = "gemmsmith_kernels"


@cache
def folders() -> tuple[Path, ...]:
    """The installed folders of packs; none where no such wheel is installed."""
    spec = find_spec(NAMESPACE)
    places = spec.submodule_search_locations if spec is not None else None
    return tuple(
        folder
        for place in places or ()
        for folder in sorted(Path(place).glob("*"))
        if folder.is_dir() and not folder.name.startswith("_")
    )


def find(pack_hash: str) -> Path | None:
    """The installed pack of this hash, whole; None where there is none."""
    for folder in folders():
        path = folder / f"{pack_hash}.so"
        try:
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() == pack_hash:
                    return path
        except OSError:
            continue
    return None
