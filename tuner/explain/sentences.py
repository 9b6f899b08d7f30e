"""The sentences of an explanation. Each is made of the figures that it names.

What makes the difference is the part of the time (`tuner.explain.breakdown`) in which the two
sides differ most. If the parts do not add up to the difference that was measured, the sentence
says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from gemmsmith.answers.answer import Ratio
from gemmsmith.core.config import Use
from tuner.explain.breakdown import TimePart
from tuner.explain.competitors import Bound, Competitor, Work
from tuner.explain.grid import Grid
from tuner.measure.power import GROWTH
from tuner.trial import Winner

EXPLAINED, TOO_MUCH = 0.5, 2.0
"""Parts whose sum is less than the first, or more than the second share of the measured difference
do not explain it."""
NOTABLE = 0.2
"""A part of this share of the difference is named beside the largest."""
SMALL = 0.05
"""No part below this share of the difference counts as its cause."""
NEAR = 0.9
"""From this share of the limit on, nothing is left to gain with the same bytes and FLOP."""

_PHRASES = {
    TimePart.FLOOR: "the roofline",
    TimePart.PADDING: "padding",
    TimePart.WAVES: "the SMs in use",
    TimePart.L2: "reading from L2",
    TimePart.EPILOGUE: "the epilogue",
    TimePart.SPLIT: "the split along K",
    TimePart.LAUNCH: "the launch",
    TimePart.KERNELS: "what runs beside the product",
    TimePart.REST: "what the estimate does not explain",
}


class _Named(NamedTuple):
    """A side whose grid is known, and its name in a sentence."""

    subject: str
    side: Competitor
    grid: Grid


def why(winner: Winner, candidate: Competitor | None, default: Competitor | None) -> str:
    """Why the winner wins, or why the default stays."""
    if candidate is None:
        return "The default stays: no candidate survived verification."
    if default is None or winner.speedup is None:
        return "The default was not timed beside the candidate, so there is nothing to compare."
    times = f"{candidate.time_us:.2f} against {default.time_us:.2f} µs"
    if winner.use.is_default:
        verdict = _stays(winner.speedup, winner.power_penalty, times)
    else:
        runs = "cuBLASLt's algorithm" if winner.use is Use.CUBLASLT else "Our kernel"
        verdict = f"{runs} is {winner.speedup.median:.3f} times as fast, {times}."
    cause = _cause(candidate, default, is_tie=_is_tie(winner))
    return " ".join((verdict, *_spreads(winner), cause))


def _is_tie(winner: Winner) -> bool:
    ratio = winner.speedup
    return winner.use.is_default and ratio is not None and ratio.ci_low <= 1.0 <= ratio.ci_high


def _stays(ratio: Ratio, penalty: float | None, times: str) -> str:
    if ratio.ci_high < 1.0:
        return f"The default stays: the best candidate is slower, {times}."
    if ratio.ci_low <= 1.0:
        return (
            f"The default stays: the best candidate takes as long, {times}; the interval of the "
            f"ratio is {ratio.ci_low:.3f} … {ratio.ci_high:.3f}."
        )
    faster = f"The default stays: the best candidate is {ratio.median:.3f} times as fast ({times})"
    if penalty is not None and penalty > ratio.ci_low:
        return (
            f"{faster}, but draws so much more power that a program at the power limit gains only "
            f"beyond {penalty:.3f}."
        )
    return f"{faster}, but not reliably so in every regime."


def _spreads(winner: Winner) -> Iterator[str]:
    """The ratio by the distribution of tokens, of a grouped problem."""
    if winner.spreads:
        ratios = ", ".join(
            f"{item.default_us / item.median_us:.3f} on {item.spread.replace('_', ' ')} groups"
            for item in winner.spreads
        )
        yield f"Under sustained work the ratio is {ratios}."


def _cause(candidate: Competitor, default: Competitor, *, is_tie: bool) -> str:
    """What the figures say about the difference of the times."""
    amount = abs(default.time_us - candidate.time_us)
    unexplained = f"the figures do not explain the difference of {amount:.2f} µs."
    if not candidate.parts or not default.parts:
        return f"No limits of this GPU are known: {unexplained}"
    if is_tie and (candidate.grid is None or default.grid is None):
        return "No difference beyond the noise is left to explain."
    if candidate.grid is None or default.grid is None:
        whose = "cuBLASLt's algorithm" if candidate.grid is None else "the default's kernels"
        beside = _kernels(default)
        return (
            f"The record does not name the tile of {whose}: {unexplained}"
            f"{f' Beside the product, the default runs {beside}.' if beside else ''}"
        )
    ours = _Named("the candidate", candidate, candidate.grid)
    theirs = _Named("the default", default, default.grid)
    if is_tie:
        return f"{_waves(ours)}; {_waves(theirs)}."
    slow, fast = (theirs, ours) if default.time_us >= candidate.time_us else (ours, theirs)
    saved = {
        part: slow.side.parts.get(part, 0.0) - fast.side.parts.get(part, 0.0)
        for part in TimePart
        if part is not TimePart.REST
    }
    explained = sum(saved.values())
    largest, *others = sorted(saved, key=saved.__getitem__, reverse=True)
    tiles = f"{_tiles(ours.grid)}, against {_tiles(theirs.grid)} of the default"
    if slow.grid.is_older and not fast.grid.is_older:
        return (
            f"{slow.subject.capitalize()} runs a kernel for an older architecture, without TMA and "
            f"wgmma ({tiles}). The estimate does not count that: it explains "
            f"{max(0.0, explained):.1f} of {amount:.1f} µs."
        )
    if saved[largest] <= SMALL * amount:
        return f"By tiles, waves and bytes both should take as long ({tiles}): {unexplained}"
    text = (
        f"The largest difference is {_PHRASES[largest]}, about {saved[largest]:.1f} of "
        f"{amount:.1f} µs: {_about(largest, slow)}; {_about(largest, fast)}."
    )
    named = [part for part in others if saved[part] >= NOTABLE * amount]
    if named:
        shares = ", ".join(f"{_PHRASES[part]} about {saved[part]:.1f} µs" for part in named)
        text += f" Beside it: {shares}."
    if largest is not TimePart.WAVES:
        text += f" {_waves(ours)}; {_waves(theirs)}."
    if explained < EXPLAINED * amount:
        text += f" All parts together are {explained:.1f} µs: the figures do not explain the rest."
    elif explained > TOO_MUCH * amount:
        text += f" All parts together would be {explained:.1f} µs: the estimate is too large."
    return text


def _about(part: TimePart, named: _Named) -> str:
    """What of a side its time for this part follows from."""
    subject, side, grid = named
    size = f"{grid.tile[0]}×{grid.tile[1]}"
    match part:
        case TimePart.PADDING:
            return f"the tiles of {subject} compute {1 / grid.whole - 1:.0%} more than the product"
        case TimePart.WAVES:
            return _waves(named)
        case TimePart.L2:
            return f"{subject} reads {grid.l2_bytes / 1e6:.0f} MB from L2"
        case TimePart.EPILOGUE if grid.rounds <= 1:
            return f"{subject} stores one tile of {size} an SM"
        case TimePart.EPILOGUE:
            when = "beside the products of the next" if grid.overlaps else "before the next begins"
            return f"{subject} stores {grid.rounds} tiles of {size} an SM, each {when}"
        case TimePart.SPLIT if not grid.splits:
            return f"{subject} splits K, and another kernel adds the parts"
        case TimePart.SPLIT:
            times = f" {grid.splits} times" if grid.splits > 1 else ""
            return f"{subject} splits K{times}" if times else f"{subject} does not split K"
    return f"{subject} runs {_kernels(side) or 'nothing else'}"


def _kernels(side: Competitor) -> str:
    """The kernels beside the product; empty if nothing else runs."""
    others, passes = side.kernels.others, side.kernels.passes
    if not others:
        return ""
    more = "1 more kernel" if others == 1 else f"{others} more kernels"
    if not passes:
        return more
    return f"{more}, for {passes} reads or writes of a matrix of D's size"


def _tiles(grid: Grid) -> str:
    one = grid.tiles == 1
    return f"{grid.tiles:,} tile{'' if one else 's'} of {grid.tile[0]}×{grid.tile[1]}"


def _waves(named: _Named) -> str:
    return f"{_tiles(named.grid)} of {named.subject} are {waves_text(named.grid)}"


def waves_text(grid: Grid) -> str:
    """`7.76 waves, with 100 SMs busy in the last`."""
    if grid.waves is None:
        return "split along K into a number of parts that is not on record"
    if grid.shares_evenly:
        return f"{grid.waves:.2f} waves, the last of which all SMs share"
    if grid.rounds == 1:
        return f"{grid.waves:.2f} of a wave, with {grid.busy_in_last} SMs busy"
    return f"{grid.waves:.2f} waves, with {grid.busy_in_last} SMs busy in the last"


def left(work: Work, served: Competitor | None) -> str:
    """What is left to gain for what is served."""
    if served is None or served.share is None or work.roofline is None or work.floor_us is None:
        return "No limits of this GPU are known, so what is left to gain is not known."
    by_memory = work.bound is Bound.MEMORY
    limit = work.roofline.bandwidth if by_memory else work.roofline.peak
    kind = "bandwidth" if by_memory else "rate of these types"
    whose = f"highest {kind} on record" if limit.is_measured else f"nominal {kind}"
    if served.share >= NEAR:
        fewer = "bytes" if by_memory else "FLOP, or a smaller type"
        return f"{served.share:.2f} of the {whose}: nothing to gain but fewer {fewer}."
    lost_us = served.time_us - work.floor_us
    text = f"{served.share:.2f} of the {whose}: {lost_us:.1f} µs above the least time."
    parts = {part: us for part, us in served.parts.items() if part is not TimePart.FLOOR}
    order = sorted(parts, key=parts.__getitem__, reverse=True)
    named = [part for part in order[:2] if parts[part] >= NOTABLE * lost_us]
    if not named:
        return f"{text} No single part of it is large."
    shares = " and ".join(f"{_PHRASES[part]} (about {parts[part]:.1f} µs)" for part in named)
    return f"{text} The largest part of it is {shares}."


def power(winner: Winner) -> str:
    """What the candidate's power costs a program at the power limit."""
    penalty = winner.power_penalty
    if winner.problem.operation.accumulate:
        return "Sums into FP32 have no power penalty."
    if penalty is None:
        return "The power penalty was not measured: the GPU was not near its power limit."
    if penalty <= 1.0:
        return (
            "No power penalty: the candidate draws no more power than the default, or is faster "
            "than any penalty."
        )
    drawn = 1 + GROWTH * (penalty - 1)
    return (
        f"At the same clock the candidate draws about {drawn:.2f} times the default's power: a "
        f"program at the power limit gains only beyond {penalty:.3f} times the speed."
    )
