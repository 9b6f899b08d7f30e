"""This machine's GPUs, by the driver alone: no torch, no CUDA context, no GPU memory."""

from __future__ import annotations

import functools
import uuid
from typing import Any

from gemmsmith.core.device import DeviceModel


def local_gpu(ordinal: int = 0) -> DeviceModel | None:
    """The model of a local GPU; None without a driver or without a GPU of that ordinal."""
    driver = _driver()
    if driver is None:
        return None
    status, device = driver.cuDeviceGet(ordinal)
    if status != driver.CUresult.CUDA_SUCCESS:
        return None

    def attribute(name: str) -> int:
        key = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        status, value = driver.cuDeviceGetAttribute(key, device)
        return int(value) if status == driver.CUresult.CUDA_SUCCESS else 0

    _, name = driver.cuDeviceGetName(128, device)
    _, memory = driver.cuDeviceTotalMem(device)
    bus_bytes = attribute("GLOBAL_MEMORY_BUS_WIDTH") // 8
    return DeviceModel(
        name=name.split(b"\0")[0].decode(),
        arch=f"sm{attribute('COMPUTE_CAPABILITY_MAJOR')}{attribute('COMPUTE_CAPABILITY_MINOR')}",
        sm_count=attribute("MULTIPROCESSOR_COUNT"),
        memory_bytes=int(memory),
        l2_bytes=attribute("L2_CACHE_SIZE"),
        max_clock_mhz=attribute("CLOCK_RATE") // 1000,
        # Two transfers per clock: the driver reports kHz of the memory clock.
        memory_bandwidth=attribute("MEMORY_CLOCK_RATE") * 1000 * 2 * bus_bytes,
    )


def gpu_uuid(ordinal: int = 0) -> str:
    """The GPU's UUID as NVML and nvidia-smi write it; empty without such a GPU."""
    driver = _driver()
    if driver is None:
        return ""
    status, device = driver.cuDeviceGet(ordinal)
    if status != driver.CUresult.CUDA_SUCCESS:
        return ""
    status, identifier = driver.cuDeviceGetUuid(device)
    if status != driver.CUresult.CUDA_SUCCESS:
        return ""
    return f"GPU-{uuid.UUID(bytes=bytes(identifier.bytes))}"


@functools.cache
def _driver() -> Any:
    """The driver bindings, initialized; None without a driver or GPU."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return None
    try:
        (status,) = driver.cuInit(0)
    except RuntimeError:  # the bindings raise it if libcuda is not installed
        return None
    return driver if status == driver.CUresult.CUDA_SUCCESS else None
