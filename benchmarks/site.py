"""Packs wheels into one small archive, to carry more of them to a GPU host without internet.

    python benchmarks/site.py .wheels [PATTERN …]

It writes `site.tar.xz` beside the wheels, which benchmarks/gpu_session.py unpacks where it would
else install the wheels: a quarter of their size, because compiled code loses its symbols and many
small files are compressed together. Wheels that match a pattern are left out (those that the host
has), and so is what no session runs.
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

LEFT_OUT = (
    "ray/jars/*",
    "ray/rllib/*",
    "ray/llm/*",
    "ray/cpp/*",
    "ray/dashboard/client/*",
    "*/pginstall/include/*",
    "*.a",
)
"""Of Ray: what is for Java and C++, a library, and the pages. Of PostgreSQL: its headers."""

AS_IT_IS = ("pgserver/*", "*.libs/*")
"""Programs and libraries whose paths were written into them later: `strip` breaks those."""

_ELF = b"\x7fELF"


def pack(folder: Path, absent: list[str]) -> Path:
    """Write the archive of the wheels in a folder; its path."""
    aside = folder / f"{ARCHIVE}.part"
    wheels = [
        wheel
        for wheel in sorted(folder.glob("*.whl"))
        if not any(fnmatch(wheel.name, each) for each in absent)
    ]
    with tarfile.open(aside, "w:xz", preset=9) as tar:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as held:
                for info in held.infolist():
                    if info.is_dir() or any(fnmatch(info.filename, x) for x in LEFT_OUT):
                        continue
                    content = held.read(info)
                    if not any(fnmatch(info.filename, x) for x in AS_IT_IS):
                        content = _stripped(content)
                    _add(tar, info, content)
    aside.replace(folder / ARCHIVE)
    return folder / ARCHIVE


def _add(tar: tarfile.TarFile, info: zipfile.ZipInfo, content: bytes) -> None:
    entry = tarfile.TarInfo(info.filename)
    entry.size, entry.mode = len(content), 0o755 if info.external_attr >> 16 & 0o111 else 0o644
    tar.addfile(entry, io.BytesIO(content))


def _stripped(content: bytes) -> bytes:
    """Compiled code without its symbols, where `strip` can do that; else as it is."""
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
