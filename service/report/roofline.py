"""The roofline: TFLOP/s over FLOP per byte, both logarithmic, under what the GPU can do.

Two roofs may be drawn. The measured one, a solid line, is the copy bandwidth and the rate of a
large cuBLAS product (`tuner.measure.ceilings`); the nominal one, dashed, follows from the device
model's memory bandwidth and clock and is out of reach.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gemmsmith.device import DeviceModel
from gemmsmith.operation import of_dtype
from service.report.axes import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Scale,
    decades,
    grid_column,
    grid_line,
    log_scale,
    svg,
    text,
    title,
    upright,
)
from service.report.rows import ReportRow, Side
from tuner.arch import ARCHITECTURES
from tuner.measure.ceilings import Ceilings

HEIGHT = 420


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
        """How style sheets call its line."""
        return "roof" if self.measured else "roof nominal"


def measured_roof(ceilings: Ceilings | None, dtype: str) -> Roof | None:
    """The roof that was measured for these element types, if it was."""
    peak = ceilings.peak(dtype) if ceilings else None
    if ceilings is None or peak is None:
        return None
    return Roof(bandwidth=ceilings.bandwidth, peak=peak, measured=True)


def nominal_roof(device: DeviceModel, dtype: str) -> Roof | None:
    """The roof that the device model's figures come to; None where it lacks one of them."""
    arch = ARCHITECTURES.get(device.arch)
    if not (device.memory_bandwidth and device.max_clock_mhz and arch):
        return None
    per_clock = arch.peak_flops_per_clock(of_dtype(dtype).a.bits)
    flops = device.sm_count * per_clock * device.max_clock_mhz * 1e6
    return Roof(bandwidth=float(device.memory_bandwidth), peak=flops, measured=False)


def roofline(rows: Sequence[ReportRow], dtype: str, roofs: Sequence[Roof]) -> str:
    """CUTLASS and cuBLAS of each row, joined; empty where no row has both times."""
    points = [(row, row.cutlass, row.cublas) for row in rows if row.cutlass and row.cublas]
    if not points:
        return ""
    rates = [_tflops(side) for _, a, b in points for side in (a, b)]
    rates += [roof.peak / 1e12 for roof in roofs]
    places = [row.intensity for row, *_ in points] + [roof.ridge for roof in roofs]
    left, right = min(places) / 1.5, max(places) * (1.5 if len(roofs) < 2 else 2.5)
    low, top = min(rates) / 1.5, max(rates) * 1.5
    x = log_scale(left, right, LEFT, WIDTH - RIGHT)
    y = log_scale(low, top, HEIGHT - BOTTOM, TOP)
    parts = [grid_line(y(tick), f"{tick:g}") for tick in decades(low, top)]
    parts += [grid_column(x(tick), f"{tick:g}", HEIGHT) for tick in decades(left, right)]
    parts += [_roof(roof, (left, right, low), x, y, alone=len(roofs) == 1) for roof in roofs]
    for row, ours, theirs in points:
        at = f"{x(row.intensity):.1f}"
        parts.append(
            f'<g class="point"><path d="M{at} {y(_tflops(theirs)):.1f}V{y(_tflops(ours)):.1f}"/>'
            f'<circle class="cublas" cx="{at}" cy="{y(_tflops(theirs)):.1f}" r="4"/>'
            f'<circle class="cutlass" cx="{at}" cy="{y(_tflops(ours)):.1f}" r="3.5"/>'
            + title(
                f"{row.problem}: {row.intensity:.4g} FLOP/byte, CUTLASS {_tflops(ours):.4g}, "
                f"cuBLAS {_tflops(theirs):.4g} TFLOP/s"
            )
            + "</g>"
        )
    parts.append(text(WIDTH / 2, HEIGHT - 6, "FLOP per byte, operands moved once", "middle"))
    parts.append(upright(HEIGHT, "TFLOP/s"))
    return svg(HEIGHT, f"Roofline, {dtype}", parts)


def _roof(roof: Roof, edges: tuple[float, float, float], x: Scale, y: Scale, *, alone: bool) -> str:
    """The slope up to the ridge and the flat roof, in TB/s, TFLOP/s and FLOP per byte.

    Of two, each is named at its end: one under its line, one above.
    """
    low = edges[-1]
    bandwidth, peak, ridge = roof.bandwidth / 1e12, roof.peak / 1e12, roof.ridge
    figures = f"{peak:.0f} TFLOP/s · {bandwidth:.2f} TB/s"
    line = roof_line(roof, edges, x, y)
    if not roof.measured:
        return line + text(WIDTH - RIGHT, y(peak) - 6, f"nominal: {figures}", "end")
    return (
        line
        + (
            text(x(ridge), y(peak) - 6, figures, "middle")
            if alone
            else text(WIDTH - RIGHT, y(peak) + 16, f"measured: {figures}", "end")
        )
        + text(x(ridge) + 4, y(low) - 6, f"ridge {ridge:.0f}", "start")
        + f'<path class="ridge" d="M{x(ridge):.1f} {y(peak):.1f}V{y(low):.1f}"/>'
    )


def roof_line(roof: Roof, edges: tuple[float, float, float], x: Scale, y: Scale) -> str:
    """Its line alone, from the left edge or from where it crosses the lowest one to the right."""
    left, right, low = edges
    bandwidth = roof.bandwidth / 1e12
    start = max(left, low / bandwidth)
    return (
        f'<path class="{roof.kind}" d="M{x(start):.1f} {y(start * bandwidth):.1f}'
        f'L{x(roof.ridge):.1f} {y(roof.peak / 1e12):.1f}H{x(right):.1f}"/>'
    )


def _tflops(side: Side) -> float:
    return side.flops_per_second / 1e12
