"""Packs wheels into one small archive, to carry more of them to a GPU host without internet.

    python benchmarks/site.py .wheels [PATTERN …]

It writes `site.tar.xz` beside the wheels. benchmarks/gpu_session.py unpacks it instead of
installing the wheels. It has a quarter of their size, because compiled code loses its symbols and
many small files are compressed together. Wheels that match a pattern are left out (those that the
host has), and so are parts that no session runs.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from fnmatch import fnmatch
from pathlib import Path

ARCHIVE = "site.tar.xz"

OMITTED = (
    "ray/jars/*",
    "ray/rllib/*",
    "ray/llm/*",
    "ray/cpp/*",
    "ray/dashboard/client/*",
    "*/pginstall/include/*",
    "*.a",
)
"""Ray's parts for Java and C++, a library and its pages; PostgreSQL's headers; static libraries."""

UNSTRIPPED = ("pgserver/*", "*.libs/*")
"""Programs and libraries whose paths were patched after linking: `strip` breaks them."""

_ELF = b"\x7fELF"


def pack(folder: Path, absent: list[str]) -> Path:
    """Write the archive of the wheels in a folder, and return its path."""
    part = folder / f"{ARCHIVE}.part"
    wheels = [
        wheel
        for wheel in sorted(folder.glob("*.whl"))
        if not any(fnmatch(wheel.name, pattern) for pattern in absent)
    ]
    with tarfile.open(part, "w:xz", preset=9) as tar:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                for info in archive.infolist():
                    if info.is_dir() or any(fnmatch(info.filename, x) for x in OMITTED):
                        continue
                    content = archive.read(info)
                    if not any(fnmatch(info.filename, x) for x in UNSTRIPPED):
                        content = _stripped(content)
                    _add(tar, info, content)
    part.replace(folder / ARCHIVE)
    return folder / ARCHIVE


def _add(tar: tarfile.TarFile, info: zipfile.ZipInfo, content: bytes) -> None:
    entry = tarfile.TarInfo(info.filename)
    entry.size, entry.mode = len(content), 0o755 if info.external_attr >> 16 & 0o111 else 0o644
    tar.addfile(entry, io.BytesIO(content))


def _stripped(content: bytes) -> bytes:
    """Remove the symbols of compiled code, if `strip` can; return other content unchanged."""
    if not content.startswith(_ELF):
        return content
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        words = ["strip", "--strip-unneeded", file.name]
        if subprocess.run(words, capture_output=True, check=False).returncode:
            return content
        return Path(file.name).read_bytes()


if __name__ == "__main__":
    made = pack(Path(sys.argv[1]), sys.argv[2:])
    print(f"{made}: {made.stat().st_size / 2**20:.1f} MiB")
