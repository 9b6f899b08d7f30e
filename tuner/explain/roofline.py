"""The limits of a product's rate on a GPU: measured in the same regime, and nominal.

A single product's rate is no limit: another shape of the same types runs up to 1.16 times as fast
as cuBLAS's 8192×8192×8192 (NVIDIA H200, 2026-11-23). So a measured limit is the highest rate on
record: of the shipped winners, of their defaults, and of `gemmsmith ceilings`. Times of one regime
are compared with rates of the same regime.

Nominal limits follow from the clock, the tensor cores and the memory bus. No product reaches them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from gemmsmith.answers.answer import Regime
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.operation import of_dtype
from gemmsmith.core.problem import Problem
from tuner import places
from tuner.arch import ARCHITECTURES
from tuner.exchange import read_winners
from tuner.measure.ceilings import CeilingsError, path_for, read_ceilings
from tuner.trial import Winner
from tuner.workloads.footprint import CACHE_FACTOR, MAX_SETS, footprint, least_bytes

NOMINAL = "nominal"
_Key = tuple[str, Regime | None]
"""Element types, or "" for bytes, with a regime, or None for FLOP in a clock cycle."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """A rate, and where it comes from.

    Attributes:
        rate: FLOP or bytes per second.
        source: the problem that reached it, `a large copy`, or `nominal`.
    """

    rate: float
    source: str

    @property
    def is_measured(self) -> bool:
        return self.source != NOMINAL


@dataclass(frozen=True, kw_only=True, slots=True)
class Roofline:
    """Roofline of products of some element types in one regime on a device model.

    Attributes:
        flops_per_clock: the highest on record in a cycle of the SMs' clock. The clock is recorded
            in the sustained regime only; 0 in others.
    """

    peak: Limit
    bandwidth: Limit
    nominal_peak: float
    nominal_bandwidth: float
    flops_per_clock: float = 0.0

    @property
    def ridge(self) -> float:
        """FLOP per byte above which the peak is the limit, and below which the bandwidth."""
        return self.peak.rate / self.bandwidth.rate

    def least_us(self, problem: Problem) -> tuple[float, float]:
        """Microseconds that memory takes at least, and the tensor cores."""
        moved_us = least_bytes(problem) / self.bandwidth.rate * 1e6
        return moved_us, problem.flops / self.peak.rate * 1e6

    def raised(self, problem: Problem, time_us: float) -> Roofline:
        """The same roofline, raised to what a launch that took `time_us` reached."""
        peak = Limit(rate=problem.flops / time_us * 1e6, source=str(problem))
        bandwidth = Limit(rate=least_bytes(problem) / time_us * 1e6, source=str(problem))
        return replace(
            self,
            peak=max(self.peak, peak, key=lambda limit: limit.rate),
            bandwidth=max(self.bandwidth, bandwidth, key=lambda limit: limit.rate),
        )


def regime_of(winner: Winner) -> Regime:
    """The regime of a winner's `statistics`: the one in which its candidate gains least."""
    if winner.statistics is not None:
        for item in winner.regimes:
            if item.median_us == winner.statistics.median_us:
                return item.regime
    return Regime.SUSTAINED  # the only one before gemmsmith 0.2


def roofline_of(problem: Problem, device: DeviceModel, regime: Regime) -> Roofline | None:
    """The roofline of a problem's types; None if neither measurements nor the model know them."""
    types = problem.operation.types.value
    nominal_peak, nominal_bandwidth = nominal(device, problem.dtype)
    known = _highest(device.slug)
    peak = known.get((types, regime)) or _nominal(nominal_peak)
    bandwidth = known.get(("", regime)) or _nominal(nominal_bandwidth)
    per_clock = known.get((types, None))
    if peak is None or bandwidth is None:
        return None
    return Roofline(
        peak=peak,
        bandwidth=bandwidth,
        nominal_peak=nominal_peak,
        nominal_bandwidth=nominal_bandwidth,
        flops_per_clock=per_clock.rate if per_clock and regime is Regime.SUSTAINED else 0.0,
    )


def nominal(device: DeviceModel, dtype: str) -> tuple[float, float]:
    """FLOP and bytes per second that a device model's figures give; 0 where one is unknown."""
    arch = ARCHITECTURES.get(device.arch)
    per_clock = arch.peak_flops_per_clock(of_dtype(dtype).a.bits) if arch else 0
    flops = device.sm_count * per_clock * device.max_clock_mhz * 1e6
    return flops, float(device.memory_bandwidth)


def _nominal(rate: float) -> Limit | None:
    return Limit(rate=rate, source=NOMINAL) if rate else None


def highest_peak(device: str, types: str) -> float | None:
    """FLOP per second that these types reached in any regime on a device model; None if never."""
    known = _highest(device)
    rates = [known[types, regime].rate for regime in Regime if (types, regime) in known]
    return max(rates, default=None)


def highest_bandwidth(device: str) -> float | None:
    """Bytes per second, as `highest_peak`."""
    return highest_peak(device, "")


@functools.lru_cache(maxsize=64)
def _highest(device: str) -> dict[_Key, Limit]:
    """The highest rate of each type and regime, and of each type in a clock cycle."""
    highest: dict[_Key, Limit] = {}
    for key, limit in _rates(device):
        if key not in highest or limit.rate > highest[key].rate:
            highest[key] = limit
    return highest


def _rates(device: str) -> Iterator[tuple[_Key, Limit]]:
    yield from _of_ceilings(device)
    for path in sorted(places.shipped("configs/winners").glob("*.jsonl")):
        if path.name.partition(".")[0] == device:
            for winner in read_winners(path):
                yield from _of_winner(winner)


def _of_ceilings(device: str) -> Iterator[tuple[_Key, Limit]]:
    path = path_for(device)
    try:
        ceilings = read_ceilings(path)
    except (FileNotFoundError, CeilingsError):  # `gemmsmith report` says which
        return
    for regime in Regime:  # a copy is not slowed by the power limit
        yield ("", regime), Limit(rate=ceilings.bandwidth, source="a large copy")
    for peak in ceilings.peaks:
        types = peak.problem.operation.types.value
        limit = Limit(rate=peak.flops_per_second, source=str(peak.problem))
        yield (types, Regime.SUSTAINED), limit


def _of_winner(winner: Winner) -> Iterator[tuple[_Key, Limit]]:
    problem = winner.problem
    times = [
        (item.regime, us)
        for item in winner.regimes
        for us in (item.median_us, item.default_us)
        if us
    ]
    cold = is_cold(problem, winner.device)
    types, source = problem.operation.types.value, str(problem)
    clock_mhz = winner.conditions.sm_clock_mhz if winner.conditions else 0.0
    for regime, us in times:
        rate = problem.flops / us * 1e6
        yield (types, regime), Limit(rate=rate, source=source)
        if regime is Regime.SUSTAINED and clock_mhz:
            yield (types, None), Limit(rate=rate / (clock_mhz * 1e6), source=source)
        if cold:
            moved = Limit(rate=least_bytes(problem) / us * 1e6, source=source)
            yield ("", regime), moved


def is_cold(problem: Problem, device: DeviceModel) -> bool:
    """Whether measuring reads the operands from memory: smaller ones stay in the cache."""
    return footprint(problem).one_set * MAX_SETS > CACHE_FACTOR * device.l2_bytes
