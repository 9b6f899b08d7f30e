"""The software around a measurement. Runs in the measuring child: it asks torch and cuBLAS."""

from __future__ import annotations

import ctypes
import importlib.metadata

import torch
from cuda.bindings import driver

from gemmsmith.core.device import DeviceModel, Environment
from gemmsmith.version import VERSION
from tuner.backends.cutlass import package
from tuner.errors import CompilerNotFound, NoGpu
from tuner.measure.conditions import Monitor
from tuner.measure.local_gpu import gpu_uuid

_UNKNOWN = ""


def open_gpu(model: DeviceModel, ordinal: int) -> tuple[Monitor, Environment]:
    """Create the context of a local GPU that driver calls use; how to watch it, and its software.

    Versions that are unknown are empty.

    Raises:
        NoGpu: this torch cannot use it.
    """
    if not torch.cuda.is_available():
        raise NoGpu(
            f"the driver has {model.name}, but torch {torch.__version__} has no CUDA support: "
            "install a CUDA build of torch"
        )
    torch.cuda.set_device(ordinal)
    torch.zeros(1, device=f"cuda:{ordinal}")  # creates the context
    uuid = gpu_uuid(ordinal)
    monitor = Monitor(uuid)
    return monitor, Environment(
        gpu_uuid=uuid,
        driver=monitor.driver_version or _driver_cuda(),
        cuda=torch.version.cuda or _UNKNOWN,
        cutlass=package.version(),
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
