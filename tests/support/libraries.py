"""Which cuBLASLt this process runs: its algorithms are valid for one version only."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os

_NAMES = ("libcublasLt.so.13", "libcublasLt.so.12")


def library_version() -> int | None:
    """The version of the libcublasLt that the process has loaded, as packs see it; None: none.

    Load torch first: it brings its own. Looks for what is loaded and loads nothing itself.
    """
    for name in _NAMES:
        with contextlib.suppress(OSError):
            return _version_of(name)
    return None


@functools.cache
def _version_of(name: str) -> int:
    get = ctypes.CDLL(name, mode=os.RTLD_NOW | os.RTLD_NOLOAD).cublasLtGetVersion
    get.restype, get.argtypes = ctypes.c_size_t, []
    return int(get())
