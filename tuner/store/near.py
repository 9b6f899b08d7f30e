"""The nearest measured problems, by Euclidean distance of (log2 m, log2 n, log2 k)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sqlalchemy import Row, Select
from sqlalchemy.orm import Session

from gemmsmith.core.problem import Problem
from tuner.store.models import CURRENT, DeviceRow, ProblemRow, WinnerRow

_STEPS = (0.25, 1.0, 4.0)
"""Reaches tried before a longer one. Among a million winners a question has enough neighbours in
the first (20 ms instead of 360); only where there are too few is more of (operation, batch)
scanned."""


def nearest(
    session: Session,
    winners: Select[WinnerRow, ProblemRow],
    problem: Problem,
    device: str,
    limit: int,
    reach: float = math.inf,
) -> Sequence[Row[WinnerRow, ProblemRow]]:
    """Rows of `winners` (which joins problems and devices) nearest first, ties by problem id.

    None is farther than `reach`, in octaves.
    """
    offsets = [
        column - math.log2(extent)
        for column, extent in (
            (ProblemRow.lg_m, problem.m),
            (ProblemRow.lg_n, problem.n),
            (ProblemRow.lg_k, problem.k),
        )
    ]
    squared = offsets[0] * offsets[0] + offsets[1] * offsets[1] + offsets[2] * offsets[2]
    query = (
        winners.where(CURRENT, DeviceRow.slug == device)
        .where(
            ProblemRow.operation == problem.operation.key,
            ProblemRow.batch == problem.batch,
            *(
                getattr(ProblemRow, name) == getattr(problem, name)
                for name in problem.operation.fixed_extents
            ),
        )
        .order_by(squared, ProblemRow.id)
        .limit(limit)
    )
    rows: Sequence[Row[WinnerRow, ProblemRow]] = []
    for radius in (*(step for step in _STEPS if 4 * step <= reach), reach):
        if math.isinf(radius):
            return session.execute(query).all()
        around = query.where(
            squared <= radius * radius,
            ProblemRow.lg_m.between(math.log2(problem.m) - radius, math.log2(problem.m) + radius),
        )
        rows = session.execute(around).all()
        if len(rows) == limit:
            break
    return rows
