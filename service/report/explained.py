"""An explanation (`tuner.explain`) as rows, which the command line and the problem's page print."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from service.report.verdict import NONE
from tuner.explain import Explanation
from tuner.explain.breakdown import TimePart
from tuner.explain.competitors import Competitor, Energy
from tuner.explain.grid import Grid
from tuner.explain.resources import Resources
from tuner.explain.roofline import Limit
from tuner.explain.waits import words
from tuner.profiling.records import Counters, ProblemProfile


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """Rows under a title: a label, and what the candidate and the default have there."""

    title: str
    rows: tuple[tuple[str, str, str], ...]


def work(item: Explanation) -> Iterator[tuple[str, str]]:
    """Yield a label and a text for each line about the problem itself."""
    needs, roofline = item.work, item.work.roofline
    text = f"{_scaled(needs.flops)}FLOP, {_scaled(needs.least_bytes)}B at least"
    yield "work", f"{text}, {needs.intensity:.4g} FLOP per byte"
    if needs.groups_read is not None:
        share = f"{needs.groups_read:.1f} of {item.problem.batch}"
        yield "groups", f"{share} have tokens, on average over the measured spreads"
    if roofline is None or needs.floor_us is None:
        yield "limits", "not known for this GPU"
        return
    by_memory = needs.bound == "memory"
    limit = roofline.bandwidth if by_memory else roofline.peak
    name = "memory" if by_memory else "the tensor cores"
    yield "bound", f"{name}: {needs.floor_us:.2f} µs at least, at {_rate(limit, by_memory)}"
    yield "ridge", f"{roofline.ridge:.0f} FLOP per byte: below it memory is the limit"
    if needs.nominal_floor_us is not None:
        yield (
            "nominal",
            f"{needs.nominal_floor_us:.2f} µs at {roofline.nominal_peak / 1e12:.0f} TFLOP/s and "
            f"{roofline.nominal_bandwidth / 1e12:.2f} TB/s, which no product reaches",
        )
    yield "regime", f"{item.regime}: the one in which the candidate gains least"


def sections(item: Explanation) -> Iterator[Section]:
    """Yield what both sides have, part by part."""
    sides = item.candidate, item.default
    yield _section("Time", sides, _TIME)
    yield _section("Grid", tuple(side and side.grid for side in sides), _GRID)
    yield _section("Occupancy", tuple(side and side.resources for side in sides), _RESOURCES)
    yield _section("Energy", tuple(side and side.energy for side in sides), _ENERGY)
    parts = tuple(
        (part.value, _part(item.candidate, part), _part(item.default, part))
        for part in TimePart
        if any(side and abs(side.parts.get(part, 0.0)) >= _SHOWN_US for side in sides)
    )
    yield Section(title="Where the time goes, an estimate", rows=parts)
    if item.profile is not None:
        yield from counters(item.profile, is_earlier=item.profile_is_earlier)


def counters(profile: ProblemProfile, *, is_earlier: bool = False) -> Iterator[Section]:
    """Yield what Nsight Compute counted of the main kernels of both sides.

    `is_earlier`: the candidate is not today's winner.
    """
    sides = profile.candidate.main, profile.default.main
    of = "an earlier candidate, " if is_earlier else ""
    yield _section(f"Nsight Compute, {of}{profile.recorded_at[:10]}", sides, _COUNTERS)
    reasons = [
        reason
        for reason in dict.fromkeys(reason for side in sides for reason in side.waits)
        if any(side.waits.get(reason, 0.0) >= SHOWN_WAIT for side in sides)
    ]
    rows: dict[str, Callable[..., str]] = {
        words(reason): partial(_waiting, reason) for reason in reasons
    }
    yield _section("What a warp waits for", sides, rows)


def _waiting(reason: str, side: Counters) -> str:
    return f"{side.waits[reason]:.1%}" if reason in side.waits else NONE


_SHOWN_US = 0.05
"""Parts of less are not printed."""
SHOWN_WAIT = 0.02
"""Nor are reasons to wait of a smaller share on both sides."""


def _section(title: str, sides: tuple[object, ...], rows: dict[str, Callable[..., str]]) -> Section:
    made = (
        (label, *(text(side) if side is not None else NONE for side in sides))
        for label, text in rows.items()
    )
    return Section(
        title=title,
        rows=tuple(
            (label, ours, theirs) for label, ours, theirs in made if {ours, theirs} != {NONE}
        ),
    )


def _part(side: Competitor | None, part: TimePart) -> str:
    return NONE if side is None or part not in side.parts else f"{side.parts[part]:.1f} µs"


def _scaled(value: float) -> str:
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.4g} {prefix}"
    return f"{value:.4g} "


def _rate(limit: Limit, by_memory: bool) -> str:
    rate = f"{limit.rate / 1e12:.2f} TB/s" if by_memory else f"{limit.rate / 1e12:.0f} TFLOP/s"
    return (
        f"{rate}, the highest on record ({limit.source})"
        if limit.is_measured
        else (f"{rate}, nominal")
    )


def _tile(grid: Grid) -> str:
    tile = [str(extent) for extent in grid.tile if extent]
    return f"{'×'.join(tile)} · {grid.cluster[0]}×{grid.cluster[1]}"


def _split(grid: Grid) -> str:
    if grid.shares_evenly:
        return "stream-K: the last wave is shared"
    if not grid.splits:
        return "split along K"
    return f"split into {grid.splits}" if grid.splits > 1 else "no"


def _padding(grid: Grid) -> str:
    return f"{grid.lost_m:.1%}, {grid.lost_n:.1%}, {grid.lost_k:.1%}"


def _raster(grid: Grid) -> str:
    if not grid.raster:
        return NONE
    return f"along {grid.raster}" + (f", swizzle {grid.swizzle}" if grid.swizzle > 1 else "")


_TIME: dict[str, Callable[[Competitor], str]] = {
    "time": lambda side: f"{side.time_us:.2f} µs",
    "share of the limit": lambda side: f"{side.share:.2f}" if side.share is not None else NONE,
    "rate": lambda side: f"{side.tflops:.4g} TFLOP/s, {side.gb_per_s:.4g} GB/s",
    "other kernels": lambda side: str(side.kernels.others),
}
_GRID: dict[str, Callable[[Grid], str]] = {
    "tile · cluster": _tile,
    "tiles": lambda grid: f"{grid.tiles:,}",
    "waves": lambda grid: "not on record" if grid.waves is None else f"{grid.waves:.2f}",
    "SMs busy in the last": lambda grid: str(grid.busy_in_last) if grid.waves is not None else NONE,
    "blocks at once": lambda grid: (
        f"{grid.resident} × {grid.blocks_per_sm}" if grid.blocks_per_sm > 1 else str(grid.resident)
    ),
    "lost to M, N, K": _padding,
    "SM time without a tile": lambda grid: (
        f"{grid.lost_waves:.1%}" if grid.waves is not None else NONE
    ),
    "split along K": _split,
    "order of tiles": _raster,
    "read from L2 (estimate)": lambda grid: f"{_scaled(grid.l2_bytes)}B",
    "epilogue": lambda grid: "beside the next tile" if grid.overlaps else "after each tile",
    "stages": lambda grid: str(grid.stages or NONE),
}
_RESOURCES: dict[str, Callable[[Resources], str]] = {
    "threads": lambda taken: str(taken.threads or NONE),
    "shared memory": lambda taken: (
        f"{'at least ' if taken.is_named else ''}{taken.shared_bytes:,} B"
    ),
    "registers": lambda taken: str(
        taken.registers or ("not in its name" if taken.is_named else "the pack is not here")
    ),
    "spilled": lambda taken: NONE if taken.spilled_bytes is None else f"{taken.spilled_bytes} B",
    "blocks per SM": lambda taken: (
        f"{taken.blocks_per_sm}{' at most' if taken.is_named else ''}, limited by "
        f"{taken.limited_by}"
    ),
}
_ENERGY: dict[str, Callable[[Energy], str]] = {
    "power, both in turns": lambda energy: f"{energy.watts:.0f} W at {energy.clock_mhz:.0f} MHz",
    "energy of a launch": lambda energy: f"{energy.joules * 1e3:.4g} mJ",
    "FLOP per joule": lambda energy: f"{_scaled(energy.flops_per_joule)}FLOP",
}
_COUNTERS: dict[str, Callable[[Counters], str]] = {
    "duration when profiled": lambda side: f"{side.us:.2f} µs",
    "SM clock": lambda side: f"{side.clock_mhz:.0f} MHz" if side.clock_mhz else NONE,
    "waves of thread blocks": lambda side: NONE if side.waves is None else f"{side.waves:.2f}",
    "registers": lambda side: str(side.registers or NONE),
    "shared memory": lambda side: f"{side.shared_bytes:,} B" if side.shared_bytes else NONE,
    "warps on an SM": lambda side: _share(side.occupancy),
    "tensor pipe active": lambda side: _share(side.tensor),
    "issue slots busy": lambda side: _share(side.issue),
    "busiest unit of the SM": lambda side: _share(side.sm),
    "L2 throughput": lambda side: _share(side.l2),
    "DRAM throughput": lambda side: _share(side.dram),
    "moved at L2": lambda side: f"{_scaled(side.l2_bytes)}B" if side.l2_bytes else NONE,
    "moved at DRAM": lambda side: f"{_scaled(side.dram_bytes)}B" if side.dram_bytes else NONE,
}


def _share(value: float | None) -> str:
    return NONE if value is None else f"{value:.1%}"
