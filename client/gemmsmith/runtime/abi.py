"""The C ABI of a kernel pack, mirrored with ctypes.

The header `gemmsmith/abi.h` is the original; a test compiles it and compares every offset.
Changing one without the other is what `ABI_VERSION` guards against at run time.
"""

from __future__ import annotations

import ctypes
from typing import Final

from gemmsmith.launch import Decomposition, Launch, RasterOrder

ABI_VERSION: Final = 1
CUDA_ERROR_BASE: Final = 1000
"""Status codes from here on are `cudaError_t` + 1000; below are `cutlass::Status`."""

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


class Arguments(ctypes.Structure):
    """`gs_arguments`: one launch, in the problem's own orientation."""

    _fields_ = [
        ("abi", ctypes.c_int32),
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
        ("raster_order", ctypes.c_int32),
        ("swizzle", ctypes.c_int32),
        ("decomposition", ctypes.c_int32),
        ("splits", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("sm_count", ctypes.c_int32),
    ]

    def set_launch(self, launch: Launch, *, sm_count: int) -> None:
        """Fill the launch fields. `sm_count` is the device's; a smaller SM budget replaces it."""
        self.raster_order = RASTER_CODES[launch.raster]
        self.swizzle = launch.swizzle
        self.decomposition = DECOMPOSITION_CODES[launch.decomposition]
        self.splits = launch.splits
        self.sm_count = min(launch.sm_budget or sm_count, sm_count)


class KernelInfo(ctypes.Structure):
    """`gs_kernel_info`: what a compiled kernel occupies."""

    _fields_ = [
        ("abi", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("shared_bytes", ctypes.c_int32),
        ("stages", ctypes.c_int32),
        ("registers", ctypes.c_int32),
        ("local_bytes", ctypes.c_int32),
    ]


def declare(library: ctypes.CDLL) -> None:
    """Give the pack's functions their C signatures.

    Raises:
        AttributeError: the shared object lacks one of them: it is not a kernel pack.
    """
    arguments = ctypes.POINTER(Arguments)
    signatures: dict[str, tuple[object, list[object]]] = {
        "gs_abi_version": (ctypes.c_int32, []),
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
    """What a status code of the C ABI means."""
    if status == 0:
        return "success"
    if status >= CUDA_ERROR_BASE:
        return f"CUDA error {status - CUDA_ERROR_BASE}"
    if status < 0:
        return f"the pack was called wrongly (status {status})"
    return _CUTLASS_STATUS.get(status, f"CUTLASS status {status}")
