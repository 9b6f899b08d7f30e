"""The compiled binding (dispatch.cpp): finds or compiles it.

It is compiled when gemmsmith is installed, if there is a C++ compiler. A checkout that was not
installed compiles it on first use, into the cache folder. There its name holds two digests, of its
source and of its own bytes. A damaged file is never loaded: that could kill the process.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from gemmsmith.answers.cache import default_cache_dir
from gemmsmith.errors import PackCorrupt
from gemmsmith.files import private_folder, publish, unsafe
from gemmsmith.runtime.pack import check_whole

SOURCE = Path(__file__).with_name("dispatch.cpp")

INSTALLED = SOURCE.with_name("_dispatch.abi3.so")
"""The same for every Python: it calls nothing of Python, and is loaded as a library."""

_FLAGS = ("-std=c++17", "-O2", "-shared", "-fPIC", "-fvisibility=hidden")

log = logging.getLogger("gemmsmith")


def binding() -> Path:
    """The undamaged file of the compiled binding, which may be compiled first.

    Raises:
        OSError: there is no compiler, nowhere to write, or others may write to the folder.
        CalledProcessError: the compiler refused.
    """
    with suppress(PackCorrupt):
        check_whole(INSTALLED)
        return INSTALLED
    source = "\0".join((SOURCE.read_text(encoding="utf-8"), platform.machine(), *_FLAGS))
    name = _digest(source.encode())
    folder = default_cache_dir() / "bindings"
    private_folder(folder)
    if reason := unsafe(folder):
        log.warning("gemmsmith's compiled binding is not used: %s", reason)
        raise OSError(reason)
    for path in folder.glob(f"{name}-*.so"):
        with suppress(FileNotFoundError):  # another process may remove the damaged file too
            if unsafe(path) is None and path.stem == f"{name}-{_digest(path.read_bytes())}":
                return path
            path.unlink()
    content = _compiled(folder)
    path = folder / f"{name}-{_digest(content)}.so"
    publish(path, content, durable=True)
    return path


def _compiled(folder: Path) -> bytes:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise OSError("no C++ compiler was found for gemmsmith's binding")
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        made = Path(temporary, "binding.so")
        command = [compiler, *_FLAGS, str(SOURCE), "-o", str(made)]
        subprocess.run(command, check=True, capture_output=True)
        return made.read_bytes()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]
