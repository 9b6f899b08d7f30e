"""A small disk that can be filled: a separate real file system."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class Disk:
    """A mounted file system that every user may write to.

    Attributes:
        folder: the mount point.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / "ballast"

    def fill(self) -> None:
        """Fill the disk to the last byte."""
        with self._ballast.open("ab", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError:
                    continue

    def free(self) -> None:
        """Remove what `fill` wrote."""
        self._ballast.unlink()


@contextmanager
def small_disk(megabytes: int) -> Iterator[Disk]:
    """A disk of this size. Skips the test if this user may not mount a file system."""
    folder = Path(tempfile.mkdtemp(prefix="gemmsmith-disk-"))
    options = f"size={megabytes}m,mode=0777"
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"no small file system can be mounted here: {done.stderr.strip()}")
        try:
            yield Disk(folder)
        finally:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
    finally:
        folder.rmdir()
