"""The software around a measurement. Runs in the measuring child: it asks torch and cuBLAS."""

from __future__ import annotations

import ctypes
import importlib.metadata

import torch
from cuda.bindings import driver

from gemmsmith.core.device import Environment
from gemmsmith.version import VERSION
from tuner.errors import CompilerNotFound

_UNKNOWN = ""


def environment(gpu_uuid: str, driver_version: str) -> Environment:
    """Versions of everything that can change a measurement; empty if unknown."""
    return Environment(
        gpu_uuid=gpu_uuid,
        driver=driver_version or _driver_cuda(),
        cuda=torch.version.cuda or _UNKNOWN,
        cutlass=_cutlass(),
        compiler=_compiler(),
        torch=str(torch.__version__),
        cublas=_cublas(),
        gemmsmith=VERSION,
    )


def _driver_cuda() -> str:
    """The CUDA version that the driver supports, if NVML did not give the driver's own version."""
    status, number = driver.cuDriverGetVersion()
    if status != driver.CUresult.CUDA_SUCCESS:
        return _UNKNOWN
    return f"cuda-{number // 1000}.{number % 1000 // 10}"


def _cublas() -> str:
    """Version of the cuBLAS that torch has loaded into this process."""
    major = (torch.version.cuda or "13").split(".")[0]
    try:
        library = ctypes.CDLL(f"libcublas.so.{major}")
    except OSError:
        return _distribution("nvidia-cublas")
    parts = []
    for kind in range(3):  # libraryPropertyType: major, minor, patch
        value = ctypes.c_int(0)
        if library.cublasGetProperty(kind, ctypes.byref(value)) != 0:
            return _UNKNOWN
        parts.append(str(value.value))
    return ".".join(parts)


def _cutlass() -> str:
    from tuner.backends.cutlass import package

    return package.version()


def _compiler() -> str:
    from tuner.compile import find_toolchain

    try:
        return find_toolchain().version
    except CompilerNotFound:  # packs may come from another machine
        return _UNKNOWN


def _distribution(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return _UNKNOWN
