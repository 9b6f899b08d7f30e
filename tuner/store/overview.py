"""The record at a glance: which operations have problems, and sums over the current winners.

Read models for the pages: plain data, a transaction of its own for each call, nothing written.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from sqlalchemy import case, func, select

from gemmsmith.core.config import Use
from tuner.store.database import Database
from tuner.store.models import CURRENT, DeviceRow, ProblemRow, WinnerRow

_MOST_OPERATIONS = 500
"""Some hundred operations exist; each that has problems costs one step down an index."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """Current winners of one `dtype` on one device model.

    Attributes:
        dtype: of the operation, all layouts together.
        problems: how many have a winner.
        ahead: for how many of them callers run something else than the default.
        saved: mean share of the default's time that callers save, 0 if the default stays.
        most: greatest speed-up that is served; None if the default always stays.
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
        """Keys of all operations that have problems, in order."""
        # Read one by one, each by a step down the problems' index: SELECT DISTINCT would read all
        # problems, of which there may be hundreds of thousands.
        operations: list[str] = []
        query = select(func.min(ProblemRow.operation))
        with self._database.read() as session:
            following = session.scalar(query)
            while following is not None and len(operations) < _MOST_OPERATIONS:
                operations.append(following)
                following = session.scalar(query.where(ProblemRow.operation > following))
        return operations

    def algorithms(self) -> Counter[int]:
        """How many current winners are algorithms of each version of cuBLASLt."""
        query = select(WinnerRow.launch).where(CURRENT, WinnerRow.use == Use.CUBLASLT.value)
        with self._database.read() as session:
            launches = session.scalars(query)
            return Counter(int(launch["algorithm"]["library"]) for launch in launches if launch)

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
