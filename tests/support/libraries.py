"""The version of cuBLASLt in this process. Algorithms are valid for a single version."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os

_NAMES = ("libcublasLt.so.13", "libcublasLt.so.12")


def library_version() -> int | None:
    """The version of the loaded libcublasLt, as a pack sees it; None if it is not loaded.

    It does not load the library. Import torch first, which loads its own.
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
