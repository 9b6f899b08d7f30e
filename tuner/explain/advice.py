"""Padding that would make a product faster: measured on a tuned neighbour, else predicted.

Rows of A, B and D that are not multiples of 16 bytes cannot be loaded or stored by TMA. A weight or
a vocabulary that is padded with zeros to a larger extent gives the same product, and some columns
or rows more. Tokens of grouped products are not padded: they differ from step to step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.problem import Problem
from tuner.explain.competitors import work_of
from tuner.explain.roofline import Roofline
from tuner.search.predict import predict
from tuner.trial import Winner

ROW_BYTES = 16
"""TMA reads and writes rows that begin at multiples of this."""
MULTIPLES = (16, 32, 64, 128)
"""Elements. Tiles are multiples of the first ones; 64 of 16 bits are a line of shared memory."""
MOST = 1.1
"""The largest padded extent, relative to the own one. Of smaller extents, the next multiple."""
WORTH = 1.05
"""Times as fast as what is served that padding must be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """A larger problem that takes less time, and contains this one.

    Attributes:
        is_measured: whether `us` was measured; else the cost model expects it.
        ratio: the time of what is served now over `us`.
    """

    padded: Problem
    us: float
    ratio: float
    is_measured: bool
    text: str


def padding(
    winner: Winner, near: Iterable[Winner], roofline: Roofline | None = None
) -> Advice | None:
    """The padding that helps most; None if none is worth it.

    `near` are tuned neighbours. Without such a one, the cost model's time counts, but no less than
    the roofline's.
    """
    problem, now_us = winner.problem, _served_us(winner)
    if now_us is None:
        return None
    measured = [
        _advice(problem, other.problem, now_us, us, True)
        for other in near
        if _contains(other.problem, problem) and (us := _served_us(other)) is not None
    ]
    expected = []
    if not measured:
        expected = [
            _advice(problem, padded, now_us, max(us, _floor_us(padded, roofline)), False)
            for padded, us in _predicted(problem, winner.device)
        ]
    best = max((*measured, *expected), key=lambda advice: advice.ratio, default=None)
    return best if best is not None and best.ratio >= WORTH else None


def _floor_us(problem: Problem, roofline: Roofline | None) -> float:
    return work_of(problem, roofline).floor_us or 0.0


def unaligned(problem: Problem) -> dict[str, str]:
    """The operands whose rows (or columns) TMA cannot load, with the extent along these."""
    operation = problem.operation
    along = {
        "A": ("k" if problem.layout.a_row_major else "m", operation.a.bytes),
        "B": ("n" if problem.layout.b_row_major else "k", operation.b.bytes),
        "D": ("n", operation.d.bytes),
    }
    return {
        operand: extent
        for operand, (extent, width) in along.items()
        if getattr(problem, extent) * width % ROW_BYTES
    }


def _served_us(winner: Winner) -> float | None:
    if winner.baseline is None:
        return None
    if winner.use.is_default or winner.speedup is None:
        return winner.baseline.median_us
    return winner.baseline.median_us / winner.speedup.median


def _contains(larger: Problem, problem: Problem) -> bool:
    """Whether the problem is a part of a slightly larger one of the same operation."""
    if larger.kind != problem.kind or larger == problem:
        return False
    pairs = [(getattr(problem, name), getattr(larger, name)) for name in ("m", "n", "k")]
    return all(own <= other <= max(MOST * own, own + MULTIPLES[0]) for own, other in pairs)


@lru_cache(maxsize=1024)
def _predicted(problem: Problem, device: DeviceModel) -> tuple[tuple[Problem, float], ...]:
    """Problems with all unaligned extents padded, and the time that the cost model expects."""
    return tuple(_expected(problem, device))


def _expected(problem: Problem, device: DeviceModel) -> Iterator[tuple[Problem, float]]:
    extents = set(unaligned(problem).values())
    fixed = problem.operation.fixed_extents
    if fixed and not extents <= {*fixed}:
        return
    seen: set[Problem] = set()
    for multiple in MULTIPLES:
        sizes = {name: -(-getattr(problem, name) // multiple) * multiple for name in extents}
        if any(
            size > max(MOST * getattr(problem, name), MULTIPLES[0]) for name, size in sizes.items()
        ):
            break
        padded = replace(problem, **sizes)
        if padded == problem or padded in seen:
            continue
        seen.add(padded)
        if prediction := predict(padded, device):
            yield padded, prediction.us


def _advice(
    problem: Problem, padded: Problem, now_us: float, us: float, is_measured: bool
) -> Advice:
    changes = " and ".join(
        f"{name.upper()} from {own} to {other}"
        for name in ("m", "n", "k")
        if (own := getattr(problem, name)) != (other := getattr(padded, name))
    )
    ratio = now_us / us
    how = "it was measured at" if is_measured else "the cost model expects"
    operands = " and ".join(unaligned(problem))
    reason = f" Rows of {operands} are not multiples of 16 bytes." if operands else ""
    return Advice(
        padded=padded,
        us=us,
        ratio=ratio,
        is_measured=is_measured,
        text=f"Pad {changes}: {how} {us:.2f} µs, {ratio:.2f} times as fast as now.{reason}",
    )
