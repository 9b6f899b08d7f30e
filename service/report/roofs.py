"""Roofs: the limits of a product's rate on a GPU.

A measured roof is the highest rate on record (`tuner.explain.roofline`). A nominal roof is computed
from the device model's memory bandwidth and clock; no product reaches it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import structlog

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.operation import of_dtype
from tuner.explain.roofline import highest_bandwidth, highest_peak, is_cold, nominal
from tuner.measure.ceilings import Ceilings, CeilingsError, path_for, read_ceilings
from tuner.trial import Winner
from tuner.workloads.footprint import least_bytes

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


def measured_roof(device: DeviceModel, dtype: str) -> Roof | None:
    """Return the highest rates of these element types in any regime; None without a record."""
    peak = highest_peak(device.slug, of_dtype(dtype).types.value)
    bandwidth = highest_bandwidth(device.slug)
    if peak is None or bandwidth is None:
        return None
    return Roof(bandwidth=bandwidth, peak=peak, measured=True)


def nominal_roof(device: DeviceModel, dtype: str) -> Roof | None:
    """Compute the roof from the device model; None if a figure is missing in it."""
    peak, bandwidth = nominal(device, dtype)
    if not (peak and bandwidth):
        return None
    return Roof(bandwidth=bandwidth, peak=peak, measured=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reached:
    """The limits of a report: its ceilings, raised to what its winners reached.

    A large product's rate is no limit: other shapes of the same types are faster. Nor is a copy's:
    a product that mostly reads moves more bytes a second.

    Attributes:
        bandwidth: bytes per second.
        above_copy: `bandwidth` over that of the large copy.
        peaks: FLOP per second by the name of the element types.
    """

    bandwidth: float
    above_copy: float
    peaks: Mapping[str, float]

    def peak(self, dtype: str) -> float | None:
        """FLOP per second of the element types; None if no peak was measured for them."""
        return self.peaks.get(of_dtype(dtype).types.value)


def reached(winners: Sequence[Winner], ceilings: Ceilings | None) -> Reached | None:
    """Return the limits of a report about these winners; None without ceilings."""
    if ceilings is None:
        return None
    bandwidth = ceilings.bandwidth
    peaks = {peak.problem.dtype: peak.flops_per_second for peak in ceilings.peaks}
    for winner in winners:
        problem, types = winner.problem, winner.problem.operation.types.value
        for time in filter(None, (winner.statistics, winner.baseline)):
            if types in peaks:
                peaks[types] = max(peaks[types], problem.flops / time.median_us * 1e6)
            if is_cold(problem, winner.device):
                bandwidth = max(bandwidth, least_bytes(problem) / time.median_us * 1e6)
    return Reached(bandwidth=bandwidth, above_copy=bandwidth / ceilings.bandwidth, peaks=peaks)
