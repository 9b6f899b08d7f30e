"""Finding a compiled pack's file by its hash, without a compiler and without building anything."""

from __future__ import annotations

from pathlib import Path


def find_pack(root: Path, pack_hash: str) -> Path | None:
    path = root / f"{pack_hash}.so"
    return path if path.is_file() else None
