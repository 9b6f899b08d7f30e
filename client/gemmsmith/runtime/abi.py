"""The C ABI of a kernel pack, as ctypes structures.

The header `gemmsmith/abi.h` is the original, and documents each field; a test compiles it and
compares every offset. Structures begin with the version and the size that their creator knows, so
packs and libraries of different ages work together: see `Spoken`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from msgspec import UNSET

from gemmsmith.core.launch import Decomposition, Launch, RasterOrder
from gemmsmith.core.operation import Scaling

ABI_VERSION: Final = 2
OLDEST_ABI_VERSION: Final = 2
"""The oldest packs that this library runs. Packs of version 1 did not report their sizes."""
ROW_GRADIENT_COLUMNS: Final = 64
"""Columns that add up to one element of `row_gradient`."""
CUDA_ERROR_BASE: Final = 1000
"""Status codes from here on are `cudaError_t` + 1000; below are `cutlass::Status`."""
CUBLAS_ERROR_BASE: Final = 2000
"""Status codes from here on are `cublasStatus_t` + 2000."""
BAD_ABI: Final = -2
NO_ALGORITHM: Final = 3002
"""GS_NO_ALGORITHM: a neighbour's algorithm does not support this product. The pack is intact."""
_LIBRARY_STATUS: Final = {
    3000: "the library it runs in (libcublasLt) cannot be loaded; install CUDA's cuBLAS",
    3001: "another version of its library (libcublasLt) is loaded than it was tuned with; tune "
    "again with this one",
    NO_ALGORITHM: "its library (libcublasLt) does not have this algorithm for this problem",
}

RASTER_CODES: Final = {
    RasterOrder.HEURISTIC: 0,
    RasterOrder.ALONG_M: 1,
    RasterOrder.ALONG_N: 2,
}
DECOMPOSITION_CODES: Final = {
    Decomposition.DATA_PARALLEL: 0,
    Decomposition.SPLIT_K: 1,
    Decomposition.STREAM_K: 2,
    Decomposition.HEURISTIC: 3,
}

SCALING_CODES: Final = {
    Scaling.NONE: 0,  # a single factor per tensor, with null pointers
    Scaling.TENSOR: 0,
    Scaling.ROW: 1,
    Scaling.BLOCK: 2,
}
"""How many factors `scale_a` and `scale_b` point to. All kernels accept a factor per tensor."""

_CUTLASS_STATUS: Final = {
    1: "an operand is not aligned as the kernel needs",
    2: "a data type the kernel does not take",
    3: "a layout the kernel does not take",
    4: "a problem the kernel does not take",
    5: "not supported by the kernel on this device",
    6: "the workspace is null though one is required",
    7: "an error within CUTLASS",
    8: "compiled for another architecture",
    9: "the driver is too old",
    10: "not enough device memory",
    11: "CUTLASS gave no reason",
}


class Sized(ctypes.Structure):
    """A structure that begins with the version and the size that this library knows."""

    def __init__(self, **fields: Any) -> None:
        fields.setdefault("abi", ABI_VERSION)
        fields.setdefault("size", ctypes.sizeof(self))
        super().__init__(**fields)


class Arguments(Sized):
    """`gs_arguments`: a launch, in the problem's own orientation. A field that is 0 is unused."""

    _fields_ = [
        ("abi", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("m", ctypes.c_int32),
        ("n", ctypes.c_int32),
        ("k", ctypes.c_int32),
        ("batch", ctypes.c_int32),
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("c", ctypes.c_void_p),
        ("d", ctypes.c_void_p),
        ("lda", ctypes.c_int64),
        ("ldb", ctypes.c_int64),
        ("ldc", ctypes.c_int64),
        ("ldd", ctypes.c_int64),
        ("batch_stride_a", ctypes.c_int64),
        ("batch_stride_b", ctypes.c_int64),
        ("batch_stride_c", ctypes.c_int64),
        ("batch_stride_d", ctypes.c_int64),
        ("alpha", ctypes.c_float),
        ("beta", ctypes.c_float),
        ("scale_a", ctypes.c_void_p),
        ("scale_b", ctypes.c_void_p),
        ("ld_scale_a", ctypes.c_int64),
        ("ld_scale_b", ctypes.c_int64),
        ("batch_stride_scale_a", ctypes.c_int64),
        ("batch_stride_scale_b", ctypes.c_int64),
        ("scale_d", ctypes.c_void_p),
        ("scaling", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("sm_count", ctypes.c_int32),
        ("raster_order", ctypes.c_int32),
        ("swizzle", ctypes.c_int32),
        ("decomposition", ctypes.c_int32),
        ("splits", ctypes.c_int32),
        ("unused", ctypes.c_int32),
        ("library_version", ctypes.c_uint64),
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace_limit", ctypes.c_int64),
        ("offsets", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("batch_stride_bias", ctypes.c_int64),
        ("residual", ctypes.c_void_p),
        ("ld_residual", ctypes.c_int64),
        ("batch_stride_residual", ctypes.c_int64),
        ("aux", ctypes.c_void_p),
        ("ld_aux", ctypes.c_int64),
        ("batch_stride_aux", ctypes.c_int64),
        ("amax", ctypes.c_void_p),
        ("activated", ctypes.c_void_p),
        ("ld_activated", ctypes.c_int64),
        ("bias_gradient", ctypes.c_void_p),
        ("b_up", ctypes.c_void_p),
        ("row_scale", ctypes.c_void_p),
        ("column_scale", ctypes.c_void_p),
        ("row_gradient", ctypes.c_void_p),
        ("reserved", ctypes.c_uint64 * 10),
    ]

    def set_launch(self, launch: Launch, *, sm_count: int) -> None:
        """Fill the launch fields. The smaller of the launch's SM budget and `sm_count` is used.

        `sm_count` is the number of the device's streaming multiprocessors.
        """
        self.sm_count = min(launch.sm_budget or sm_count, sm_count)
        if launch.algorithm is not UNSET:
            algorithm = launch.algorithm
            self.raster_order = self.decomposition = 0
            self.swizzle = self.splits = 1  # the algorithm's code includes its own values
            self.set_algorithm(algorithm.library, algorithm.words, algorithm.workspace_bytes)
            return
        self.set_algorithm(0, ())
        self.raster_order = RASTER_CODES[launch.raster]
        self.swizzle = launch.swizzle
        self.decomposition = DECOMPOSITION_CODES[launch.decomposition]
        self.splits = launch.splits

    def set_algorithm(
        self, library_version: int, algorithm: Sequence[int], workspace_limit: int = 0
    ) -> None:
        """Set the algorithm of a cuBLASLt launch.

        Args:
            library_version: `cublasLtGetVersion()` of the library that proposed the algorithm; no
                other version accepts it.
            algorithm: the eight words of `cublasLtMatmulAlgo_t`; an empty sequence clears them.
            workspace_limit: workspace in bytes that the algorithm may use; 0: the pack's default.
        """
        self.library_version = library_version
        self.algorithm = (ctypes.c_uint64 * 8)(*algorithm)
        self.workspace_limit = workspace_limit


class KernelInfo(Sized):
    """`gs_kernel_info`: the resources of a compiled kernel."""

    _fields_ = [
        ("abi", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("shared_bytes", ctypes.c_int32),
        ("stages", ctypes.c_int32),
        ("registers", ctypes.c_int32),
        ("local_bytes", ctypes.c_int32),
        ("reserved", ctypes.c_int32 * 9),
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Spoken:
    """The version of the ABI that a pack and this library share.

    Attributes:
        version: the newest version that both know.
        arguments_bytes: size of `gs_arguments` that the pack knows.
    """

    version: int
    arguments_bytes: int

    def fit(self, structure: Arguments | KernelInfo) -> None:
        """Prepare a structure for the pack.

        Raises:
            ValueError: the arguments use a field that the pack does not know.
        """
        # The size stays that of this library: the pack reads the part that it knows.
        structure.abi = self.version
        if not isinstance(structure, Arguments):
            return
        known = self.arguments_bytes
        if known < ctypes.sizeof(structure) and any(bytes(structure)[known:]):
            raise ValueError(
                f"it knows {known} bytes of arguments, and this launch uses fields beyond them"
            )


def spoken(library: ctypes.CDLL) -> Spoken:
    """The version that a pack shares with this library.

    Raises:
        AttributeError: the shared object is not a kernel pack.
        ValueError: they have no version in common; the message names the versions of both.
    """
    newest = int(library.gs_abi_version())
    # Packs of version 1 do not have `gs_abi_oldest`.
    oldest = newest if newest < OLDEST_ABI_VERSION else int(library.gs_abi_oldest())
    version = min(newest, ABI_VERSION)
    if version < max(oldest, OLDEST_ABI_VERSION):
        raise ValueError(
            f"version {_range(oldest, newest)} of the pack interface, this library version "
            f"{_range(OLDEST_ABI_VERSION, ABI_VERSION)}"
        )
    return Spoken(version=version, arguments_bytes=int(library.gs_arguments_bytes()))


def _range(oldest: int, newest: int) -> str:
    return str(newest) if oldest == newest else f"{oldest} to {newest}"


def declare(library: ctypes.CDLL) -> None:
    """Declare the C signatures of the pack's functions.

    Raises:
        AttributeError: a function is missing, so the shared object is not a kernel pack.
    """
    arguments = ctypes.POINTER(Arguments)
    signatures: dict[str, tuple[object, list[object]]] = {
        "gs_abi_version": (ctypes.c_int32, []),
        "gs_abi_oldest": (ctypes.c_int32, []),
        "gs_arguments_bytes": (ctypes.c_int32, []),
        "gs_kernel_count": (ctypes.c_int32, []),
        "gs_kernel_name": (ctypes.c_char_p, [ctypes.c_int32]),
        "gs_kernel_describe": (ctypes.c_int32, [ctypes.c_int32, ctypes.POINTER(KernelInfo)]),
        "gs_can_implement": (ctypes.c_int32, [ctypes.c_int32, arguments]),
        "gs_workspace_bytes": (ctypes.c_int64, [ctypes.c_int32, arguments]),
        "gs_run": (
            ctypes.c_int32,
            [ctypes.c_int32, arguments, ctypes.c_void_p, ctypes.c_void_p],
        ),
    }
    for name, (result, parameters) in signatures.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = parameters


def status_text(status: int) -> str:
    """The meaning of a status code of the C ABI."""
    if status == 0:
        return "success"
    if status in _LIBRARY_STATUS:
        return _LIBRARY_STATUS[status]
    if status >= CUBLAS_ERROR_BASE:
        return f"cuBLAS status {status - CUBLAS_ERROR_BASE}"
    if status >= CUDA_ERROR_BASE:
        return f"CUDA error {status - CUDA_ERROR_BASE}"
    if status < 0:
        return f"the pack was called wrongly (status {status})"
    return _CUTLASS_STATUS.get(status, f"CUTLASS status {status}")
