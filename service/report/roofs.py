"""Roofs: what bounds a product on a GPU.

The measured one is the copy bandwidth and the rate of a large cuBLAS product
(`tuner.measure.ceilings`). The nominal one follows from the device model's memory bandwidth and
clock and is out of reach.
"""

from __future__ import annotations

from dataclasses import dataclass

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.operation import of_dtype
from tuner.arch import ARCHITECTURES
from tuner.measure.ceilings import Ceilings


@dataclass(frozen=True, kw_only=True, slots=True)
class Roof:
    """What bounds a product: bytes per second, FLOP per second, and where they come from."""

    bandwidth: float
    peak: float
    measured: bool

    @property
    def ridge(self) -> float:
        """FLOP per byte from which on the peak is the bound."""
        return self.peak / self.bandwidth

    @property
    def kind(self) -> str:
        """The classes of its line in style sheets."""
        return "roof" if self.measured else "roof nominal"


def measured_roof(ceilings: Ceilings | None, dtype: str) -> Roof | None:
    """The roof that was measured for these element types, if it was."""
    peak = ceilings.peak(dtype) if ceilings else None
    if ceilings is None or peak is None:
        return None
    return Roof(bandwidth=ceilings.bandwidth, peak=peak, measured=True)


def nominal_roof(device: DeviceModel, dtype: str) -> Roof | None:
    """The roof that the device model's figures come to; None if it lacks any of them."""
    arch = ARCHITECTURES.get(device.arch)
    if not (device.memory_bandwidth and device.max_clock_mhz and arch):
        return None
    per_clock = arch.peak_flops_per_clock(of_dtype(dtype).a.bits)
    flops = device.sm_count * per_clock * device.max_clock_mhz * 1e6
    return Roof(bandwidth=float(device.memory_bandwidth), peak=flops, measured=False)
