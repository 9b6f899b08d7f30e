"""An algorithm of another version of the library, made anew in the version that is loaded.

The bytes of an algorithm contain the version of the library that made them, so another version
refuses them. What was chosen are its settings: which algorithm, tile, stages, cluster, split of K
and so on. They are read with the library's own getter and set on an algorithm that the loaded
version initializes. That version checks whether it runs the result, and names its workspace.
Equal settings need not give equal bits: such an algorithm is verified and measured like any other.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Sequence

from gemmsmith.core.launch import ALGORITHM_BYTES, Algorithm
from gemmsmith.errors import LaunchFailed
from gemmsmith.runtime.abi import Arguments
from gemmsmith.runtime.pack import LoadedKernel
from tuner.backends.cublaslt.build import COMPUTES, TYPES
from tuner.backends.cublaslt.operations import OPERATIONS, LibraryOperation
from tuner.backends.cublaslt.proposals import Proposal, first_variant

_NAMES = ("libcublasLt.so.13", "libcublasLt.so.12")
_ID = 0
_SETTINGS = {  # cublasLtMatmulAlgoConfigAttributes_t
    _ID: ctypes.c_int32,
    1: ctypes.c_uint32,  # tile
    2: ctypes.c_int32,  # split of K
    3: ctypes.c_uint32,  # reduction
    4: ctypes.c_uint32,  # swizzle
    5: ctypes.c_uint32,  # custom option
    6: ctypes.c_uint32,  # stages
    7: ctypes.c_uint16,  # inner shape
    8: ctypes.c_uint16,  # cluster
}
_Bytes = ctypes.c_uint64 * (ALGORITHM_BYTES // 8)


def loaded() -> ctypes.CDLL | None:
    """The library that this process has loaded, which is torch's; None if it has none."""
    for name in _NAMES:
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    return None


def version_of(library: ctypes.CDLL) -> int:
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    return int(library.cublasLtGetVersion())


def settings(library: ctypes.CDLL, words: Sequence[int]) -> dict[int, int]:
    """The settings of an algorithm of any version; one that the library does not know is absent."""
    algorithm, read = _Bytes(*words), {}
    for setting, kind in _SETTINGS.items():
        value, written = kind(), ctypes.c_size_t()
        size = ctypes.c_size_t(ctypes.sizeof(value))
        error = library.cublasLtMatmulAlgoConfigGetAttribute(
            algorithm, setting, ctypes.byref(value), size, ctypes.byref(written)
        )
        if error == 0:
            read[setting] = int(value.value)
    return read


def renewed(
    kernel: LoadedKernel, arguments: Arguments, algorithm: Algorithm, library: ctypes.CDLL
) -> list[Proposal]:
    """The proposal with the same settings as an algorithm of another version; empty if none runs.

    Args:
        kernel: a kernel of the library's pack.
        arguments: the product, as for `propose`.
        algorithm: of any version of the library.
        library: the version that runs the kernel.
    """
    operation = next(item for item in OPERATIONS if item.name == kernel.name)
    words = _made(library, operation, settings(library, algorithm.words))
    if words is None:
        return []
    anew = Algorithm.of(version_of(library), words)
    try:
        checked = first_variant(kernel, arguments, anew)
    except LaunchFailed:
        return []
    return [checked] if checked is not None and checked.algorithm == anew.words else []


def _made(
    library: ctypes.CDLL, operation: LibraryOperation, chosen: dict[int, int]
) -> tuple[int, ...] | None:
    """The words of an algorithm with these settings; None if the library does not take them."""
    handle, algorithm = ctypes.c_void_p(), _Bytes()
    if _ID not in chosen or library.cublasLtCreate(ctypes.byref(handle)) != 0:
        return None
    try:
        a, b, d = (TYPES[element][0] for element in (operation.a, operation.b, operation.d))
        # The library's A is our B, and its B our A (`cublaslt/product.hpp`).
        kinds = (*COMPUTES[operation.compute], b, a, d, d, chosen[_ID])
        if library.cublasLtMatmulAlgoInit(handle, *map(ctypes.c_int, kinds), algorithm) != 0:
            return None
        for setting, value in chosen.items():
            held = _SETTINGS[setting](value)
            size = ctypes.c_size_t(ctypes.sizeof(held))
            # Some algorithms refuse a setting that they do not have; what counts is the result.
            library.cublasLtMatmulAlgoConfigSetAttribute(
                algorithm, setting, ctypes.byref(held), size
            )
    finally:
        library.cublasLtDestroy(handle)
    words = tuple(algorithm)
    return words if settings(library, words) == chosen else None
