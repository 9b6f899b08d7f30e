"""Roofs: the limits of a product's rate on a GPU.

A measured roof is the bandwidth of a copy and the rate of a large cuBLAS product
(`tuner.measure.ceilings`). A nominal roof is computed from the device model's memory bandwidth and
clock; no product reaches it.
"""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.operation import of_dtype
from tuner.arch import ARCHITECTURES
from tuner.measure.ceilings import Ceilings, CeilingsError, path_for, read_ceilings

log = structlog.get_logger("gemmsmith.service")


@dataclass(frozen=True, kw_only=True, slots=True)
class Roof:
    """Limits of a product: bytes per second, FLOP per second, and whether they were measured."""

    bandwidth: float
    peak: float
    measured: bool

    @property
    def ridge(self) -> float:
        """FLOP per byte above which the peak is the limit, and below which the bandwidth."""
        return self.peak / self.bandwidth

    @property
    def source(self) -> str:
        return "measured" if self.measured else "nominal"

    @property
    def kind(self) -> str:
        return "roof" if self.measured else "roof nominal"


def ceilings_of(device: str) -> Ceilings | None:
    """Return the ceilings of the device model with that slug; None if they were not measured.

    A file that cannot be read is logged and counts as not measured.
    """
    path = path_for(device)
    try:
        return read_ceilings(path) if path.is_file() else None
    except CeilingsError as error:
        log.warning("ceilings unusable", error=str(error))
        return None


def measured_roof(ceilings: Ceilings | None, dtype: str) -> Roof | None:
    """Return the roof that was measured for these element types, if it was."""
    peak = ceilings.peak(dtype) if ceilings else None
    if ceilings is None or peak is None:
        return None
    return Roof(bandwidth=ceilings.bandwidth, peak=peak, measured=True)


def nominal_roof(device: DeviceModel, dtype: str) -> Roof | None:
    """Compute the roof from the device model; None if a figure is missing in it."""
    arch = ARCHITECTURES.get(device.arch)
    if not (device.memory_bandwidth and device.max_clock_mhz and arch):
        return None
    per_clock = arch.peak_flops_per_clock(of_dtype(dtype).a.bits)
    flops = device.sm_count * per_clock * device.max_clock_mhz * 1e6
    return Roof(bandwidth=float(device.memory_bandwidth), peak=flops, measured=False)
