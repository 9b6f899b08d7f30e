"""Whether answers may have changed, for a few indexed reads.

`Marks` are read in one short transaction, many times a second. Equal marks mean that no answer has
changed: each change of what is served takes a new sequence (`tuner.store.winners`), each pack that
is added or removed is counted, and the environments that make winners stale are listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy import func, select

from gemmsmith.core.problem import Problem
from tuner.store.database import Database
from tuner.store.dictionary import problem_of
from tuner.store.gpus import SEEN_S
from tuner.store.models import (
    DeviceRow,
    GpuRow,
    KernelRow,
    PackKernelRow,
    PackRow,
    ProblemRow,
    WinnerRow,
)
from tuner.store.sql import now


@dataclass(frozen=True, kw_only=True, slots=True)
class Marks:
    """The state of the database, as far as answers depend on it.

    Attributes:
        sequence: of the winner that became current last; 0 without winners.
        packs: the newest pack's id, how many packs there are, and how many kernels in them.
        devices: how many device models are known; their rows are never deleted.
        gpus: UUID and environment of each GPU that makes others' winners stale.
    """

    sequence: int
    packs: tuple[int, int, int]
    devices: int
    gpus: frozenset[tuple[str, int]]


def newest(packed: Iterable[tuple[str, str | None]]) -> dict[str, str]:
    return {kernel: pack for pack, kernel in packed if kernel is not None}


class Changes:
    """Reads of what changed."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def marks(self) -> Marks:
        with self._database.glance() as connection:
            sequence, newest, packs, kernels, devices = connection.execute(_MARKS).one()
            gpus = frozenset((uuid, row_id) for uuid, row_id in connection.execute(_GPUS))
        return Marks(
            sequence=sequence or 0, packs=(newest or 0, packs, kernels), devices=devices, gpus=gpus
        )

    def served(self) -> tuple[int, tuple[int, int, int]]:
        """`sequence` and `packs` of the marks, in half the time that `marks` takes."""
        with self._database.glance() as connection:
            sequence, newest, packs, kernels = connection.execute(_SERVED).one()
        return sequence or 0, (newest or 0, packs, kernels)

    def winners_since(self, sequence: int, limit: int) -> list[tuple[str, Problem]]:
        """Device slug and problem of winners that became current since, `limit` at most."""
        query = (
            select(DeviceRow.slug, ProblemRow)
            .select_from(WinnerRow)
            .join(ProblemRow, ProblemRow.id == WinnerRow.problem_id)
            .join(DeviceRow, DeviceRow.id == WinnerRow.device_id)
            .where(WinnerRow.sequence > sequence)
            .order_by(WinnerRow.sequence)
            .limit(limit)
        )
        with self._database.read() as session:
            return [(slug, problem_of(row)) for slug, row in session.execute(query)]

    def packed(self) -> Sequence[tuple[str, str | None]]:
        """Hash of each pack with the name of each kernel in it, oldest pack first.

        A pack without known kernels comes once, with None.
        """
        query = (
            select(PackRow.hash, KernelRow.name)
            .outerjoin(PackKernelRow, PackKernelRow.pack_id == PackRow.id)
            .outerjoin(KernelRow, KernelRow.id == PackKernelRow.kernel_id)
            .order_by(PackRow.id)
        )
        with self._database.read() as session:
            return [(pack, kernel) for pack, kernel in session.execute(query)]


_SERVED = select(
    select(func.max(WinnerRow.sequence)).scalar_subquery(),
    select(func.max(PackRow.id)).scalar_subquery(),
    select(func.count()).select_from(PackRow).scalar_subquery(),
    select(func.count()).select_from(PackKernelRow).scalar_subquery(),
)
_MARKS = _SERVED.add_columns(select(func.count()).select_from(DeviceRow).scalar_subquery())
_GPUS = select(GpuRow.uuid, GpuRow.environment_id).where(GpuRow.seen_at > now() - SEEN_S)
