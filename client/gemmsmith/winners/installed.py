"""Kernel packs that were installed with pip: the wheels `gemmsmith-kernels-…`.

Each wheel is a folder of the namespace package `gemmsmith_kernels`, named after an architecture. It
holds packs (`<hash>.so`) and their descriptions (`<hash>.json`). Nothing is imported from it, and
its packs need a trusted signature like all others.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.util import find_spec
from pathlib import Path

NAMESPACE = "gemmsmith_kernels"


@cache
def folders() -> tuple[Path, ...]:
    """The folders of all installed wheels."""
    spec = find_spec(NAMESPACE)
    places = spec.submodule_search_locations if spec is not None else None
    return tuple(
        folder
        for place in places or ()
        for folder in sorted(Path(place).glob("*"))
        if folder.is_dir() and not folder.name.startswith("_")
    )


def find(pack_hash: str) -> Path | None:
    """The installed pack with this hash, which is checked; None if there is no such pack."""
    for folder in folders():
        path = folder / f"{pack_hash}.so"
        try:
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() == pack_hash:
                    return path
        except OSError:
            continue
    return None
