"""What is left to gain, by family of operations, and where a kernel by hand would pay most."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gemmsmith.core.operands import DType, Grouping, Scaling
from gemmsmith.core.operation import Operation
from service.report.verdict import NONE
from tuner.explain.headroom import BY_HAND, Cause, Headroom

WORTH = 0.1
"""A kernel by hand is listed from this share of the time on. Less is within the estimate's error:
where its parts add up to more than the time, they do so by 0.05 of it in the median (394 of the
1,725 shipped winners, 2026-11-26)."""
LISTED = 20
"""Problems that are printed of those where a kernel by hand would pay most."""

_TYPES = {
    DType.BF16: "bf16 and fp16",
    DType.FP16: "bf16 and fp16",
    DType.FP8_E4M3: "FP8",
    DType.FP8_E5M2: "FP8",
    DType.INT8: "INT8",
    DType.TF32: "TF32",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyHeadroom:
    """The headroom of the problems of a family.

    Attributes:
        time_us: of all problems, each launched once.
        reached: the median of the floor's share of the time.
        distance_us: of all problems.
        shares: of the distance, by cause. Their sum is 1.
    """

    family: str
    problems: int
    time_us: float
    reached: float
    distance_us: float
    shares: Mapping[Cause, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadroomReport:
    """Families, the greatest distance first, and where a kernel by hand would pay most.

    Attributes:
        by_hand: problems of which at least `WORTH` of the time could be saved, by what is saved.
    """

    families: tuple[FamilyHeadroom, ...]
    by_hand: tuple[Headroom, ...]


def headroom_report(items: Sequence[Headroom]) -> HeadroomReport:
    """Sum up problems of one device model."""
    families: dict[str, list[Headroom]] = {}
    for item in items:
        families.setdefault(family(item.problem.operation), []).append(item)
    sums = [_sum(name, members) for name, members in families.items()]
    worthwhile = [item for item in items if item.by_hand_share >= WORTH]
    return HeadroomReport(
        families=tuple(sorted(sums, key=lambda summed: -summed.distance_us)),
        by_hand=tuple(sorted(worthwhile, key=lambda item: -item.by_hand_us)),
    )


def _sum(name: str, members: Sequence[Headroom]) -> FamilyHeadroom:
    distance = sum(item.distance_us for item in members)
    return FamilyHeadroom(
        family=name,
        problems=len(members),
        time_us=sum(item.time_us for item in members),
        reached=statistics.median(item.floor_us / item.time_us for item in members),
        distance_us=distance,
        shares={
            cause: sum(item.causes[cause] for item in members) / distance if distance else 0.0
            for cause in Cause
        },
    )


def family(operation: Operation) -> str:
    """Name the family of an operation for people: `gated layers, bf16 and fp16`."""
    types = _TYPES.get(DType(operation.types), operation.types.value)
    scaled = " scaled by rows" if operation.scaling is Scaling.ROW else ""
    return f"{kind(operation)}, {types}{scaled}"


def kind(operation: Operation) -> str:
    """Name what an operation is for, whatever its types: `gated layers`."""
    if operation.summation is not None:
        return "one order of sums"
    epilogue, behind = operation.epilogue, operation.epilogue.backward
    backward = ", backward" if behind else ""
    if operation.grouping is Grouping.DEPTH:
        return "experts' weight gradients"
    if operation.is_grouped:
        return f"gated experts{backward}" if operation.is_fused else "experts"
    if operation.accumulate:
        return "sums into FP32"
    if operation.symmetric:
        return "symmetric products"
    if behind.gated if behind else epilogue.is_gated:
        return f"gated layers{backward}"
    if behind or (epilogue.activation and not epilogue.has_residual):
        return f"activations{backward}"
    if epilogue.has_residual:
        return "residual sums"
    if epilogue.has_row_scale:
        return "factors of rows"
    return "bias" if epilogue.has_bias else "plain products"


def largest(item: Headroom) -> Cause:
    """The largest of the causes that another kernel could avoid."""
    return max(BY_HAND, key=lambda cause: item.causes[cause])


def family_cells(item: FamilyHeadroom) -> tuple[str, ...]:
    """Return a family's line of the printed table."""
    return (
        item.family,
        str(item.problems),
        f"{item.reached:.2f}",
        f"{item.time_us / 1e3:.1f}",
        f"{item.distance_us / 1e3:.1f}",
        *(f"{share:.0%}" for share in item.shares.values()),
    )


def problem_cells(item: Headroom) -> tuple[str, ...]:
    """Return a problem's line of the list of those where a kernel by hand would pay most."""
    return (
        str(item.problem),
        f"{item.tile[0]}×{item.tile[1]}" if item.tile else NONE,
        largest(item).value,
        f"{item.time_us:.1f}",
        f"{item.floor_us:.1f}",
        f"{item.by_hand_us:.1f}",
        f"{item.by_hand_share:.0%}",
    )


def document(report: HeadroomReport) -> dict[str, Any]:
    """Return the report for JSON."""
    return {
        "families": [
            {
                "family": item.family,
                "problems": item.problems,
                "time_us": item.time_us,
                "reached": item.reached,
                "distance_us": item.distance_us,
                "shares": {cause.value: share for cause, share in item.shares.items()},
            }
            for item in report.families
        ],
        "by_hand": [str(item.problem) for item in report.by_hand],
    }
