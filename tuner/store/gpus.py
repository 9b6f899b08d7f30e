"""The GPUs that measure for this store, and their software, which decides which winners are stale.

A worker on a real GPU reports its environment now and then; a recorded GPU reports nothing. A
winner is stale if GPUs of its device model have reported within `SEEN_S` and none of them agrees
with the winner's environment in driver, CUDA, CUTLASS and cuBLAS: its kernel is still the one that
was verified, but its figures belong to other software. Staleness is not stored; it is determined
whenever a winner is read. Replayed winners are never stale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from gemmsmith.core.device import DeviceModel, Environment
from tuner.store.database import Database
from tuner.store.dictionary import Dictionary
from tuner.store.models import DeviceRow, EnvironmentRow, GpuRow, WinnerRow
from tuner.store.sql import insert_ignore, now

SEEN_S = 30 * 86_400.0
"""How long a GPU counts after its last report: longer than holidays, shorter than the absence of a
machine that comes back with another driver."""

Software = tuple[str, str, str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A GPU as it last reported; `seen_at` in seconds since the epoch, by the database's clock."""

    uuid: str
    device: DeviceModel
    environment: Environment
    seen_at: float


class InUse:
    """The software on the GPUs that have reported lately.

    Args:
        software: by the device model's id.
    """

    def __init__(self, software: Mapping[int, set[Software]]) -> None:
        self._software = software

    def outdates(self, device_id: int, environment: Environment) -> bool:
        in_use = self._software.get(device_id)
        return in_use is not None and software(environment) not in in_use

    def makes_stale(self, winner: WinnerRow, environment: Environment) -> bool:
        return not winner.replayed and self.outdates(winner.device_id, environment)


class Gpus:
    """The table of GPUs."""

    def __init__(self, database: Database, dictionary: Dictionary) -> None:
        self._database = database
        self._dictionary = dictionary

    def report(self, device: DeviceModel, environment: Environment) -> None:
        """Store the present environment of the GPU that it names, in place of the last one."""
        with self._database.write() as session:
            ids = self._dictionary.ids(session, [device, environment])
            report = {
                "device_id": ids[device],
                "environment_id": ids[environment],
                "seen_at": now(),
            }
            insert_ignore(session, GpuRow, {"uuid": environment.gpu_uuid, **report})
            session.execute(
                update(GpuRow).where(GpuRow.uuid == environment.gpu_uuid).values(**report)
            )
        self._dictionary.keep(ids)

    def known(self) -> list[Gpu]:
        """Every GPU that has ever reported, by device model and UUID."""
        query = select(GpuRow).join(DeviceRow, DeviceRow.id == GpuRow.device_id)
        with self._database.read() as session:
            return [
                Gpu(
                    uuid=row.uuid,
                    device=self._dictionary.device(session, row.device_id),
                    environment=self._dictionary.environment(session, row.environment_id),
                    seen_at=row.seen_at,
                )
                for row in session.scalars(query.order_by(DeviceRow.slug, GpuRow.uuid))
            ]

    def in_use(self, session: Session) -> InUse:
        """The software in use, which decides which winners read in `session` are stale."""
        query = select(GpuRow.device_id, GpuRow.environment_id).distinct()
        in_use: dict[int, set[Software]] = {}
        for device_id, environment_id in session.execute(
            query.where(GpuRow.seen_at > now() - SEEN_S)
        ):
            environment = self._dictionary.environment(session, environment_id)
            in_use.setdefault(device_id, set()).add(software(environment))
        return InUse(in_use)

    def outdated_environments(self, session: Session, device_id: int) -> list[int]:
        """Ids of the environments whose measurements on that device model are stale."""
        in_use = self.in_use(session)
        return [
            row_id
            for row_id in session.scalars(select(EnvironmentRow.id))
            if in_use.outdates(device_id, self._dictionary.environment(session, row_id))
        ]


def software(environment: Environment) -> Software:
    # A kernel's and cuBLAS's times depend on these.
    return (environment.driver, environment.cuda, environment.cutlass, environment.cublas)
