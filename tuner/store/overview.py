"""What there is at a glance: which operations are known, and how current winners do, added up.

Read models for the pages: plain data, a transaction of its own for each call, nothing written.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import case, func, select

from gemmsmith.core.config import Use
from tuner.store.database import Database
from tuner.store.models import CURRENT, DeviceRow, ProblemRow, WinnerRow

_MOST_OPERATIONS = 500
"""There are some hundred that exist; each that is known costs one step down an index."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """Current winners of one `dtype` on one device model.

    Attributes:
        dtype: of the operation, all layouts together.
        problems: how many have a winner.
        ahead: how many callers are told to run something else than the default.
        saved: mean share of the default's time that callers are spared, 0 where it stays.
        most: greatest speed-up that is served; None where the default always stays.
    """

    device: str
    dtype: str
    problems: int
    ahead: int
    saved: float
    most: float | None


class Overview:
    """Read models of one database. Threads may share it."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def operations(self) -> list[str]:
        """Keys of all operations that any problem has, in order.

        Asked for one by one, each by a step down the problems' index: among hundreds of thousands
        of problems SELECT DISTINCT would read them all.
        """
        found: list[str] = []
        query = select(func.min(ProblemRow.operation))
        with self._database.read() as session:
            following = session.scalar(query)
            while following is not None and len(found) < _MOST_OPERATIONS:
                found.append(following)
                following = session.scalar(query.where(ProblemRow.operation > following))
        return found

    def standings(self) -> list[Standing]:
        """All current winners by device and `dtype`; reads every one of them."""
        served = (WinnerRow.use != Use.CUBLAS.value) & (WinnerRow.speedup > 0)
        ahead = func.sum(case((served, 1), else_=0))
        saved = func.sum(case((served, 1.0 - 1.0 / WinnerRow.speedup), else_=0.0))
        most = func.max(case((served, WinnerRow.speedup)))
        query = (
            select(DeviceRow.slug, ProblemRow.dtype, func.count(), ahead, saved, most)
            .select_from(WinnerRow)
            .join(ProblemRow, ProblemRow.id == WinnerRow.problem_id)
            .join(DeviceRow, DeviceRow.id == WinnerRow.device_id)
            .where(CURRENT)
            .group_by(DeviceRow.slug, ProblemRow.dtype)
            .order_by(ProblemRow.dtype, DeviceRow.slug)
        )
        with self._database.read() as session:
            return [
                Standing(
                    device=device,
                    dtype=dtype,
                    problems=problems,
                    ahead=int(ahead),
                    saved=float(saved) / problems,
                    most=most,
                )
                for device, dtype, problems, ahead, saved, most in session.execute(query)
            ]
