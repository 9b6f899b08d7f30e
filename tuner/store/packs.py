"""Which kernels are compiled, and in which pack; the packs' bytes are in the artifact store."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import delete, select, update

from gemmsmith.core.kernel import AnyKernel
from tuner.store.audit import SYSTEM, Action, record
from tuner.store.codec import kernel_from_json
from tuner.store.database import Database
from tuner.store.dictionary import Dictionary
from tuner.store.models import KernelRow, PackKernelRow, PackRow, WinnerRow
from tuner.store.sql import insert_ignore, now


class PackTables:
    """The tables of packs and their kernels."""

    def __init__(self, database: Database, dictionary: Dictionary) -> None:
        self._database = database
        self._dictionary = dictionary

    def add(
        self, pack_hash: str, toolchain: str, kernels: Sequence[AnyKernel | None], size: int
    ) -> None:
        """Record a pack of `size` bytes, its kernels in its own order.

        None stands for a kernel of a pack from elsewhere that has no description here. Recording
        the pack again adds kernels that were None.
        """
        with self._database.write() as session:
            ids = self._dictionary.ids(session, filter(None, kernels))
            values = {"hash": pack_hash, "toolchain": toolchain, "bytes": size, "created_at": now()}
            insert_ignore(session, PackRow, values)
            row = select(PackRow.id).filter_by(hash=pack_hash).with_for_update()
            pack_id = session.scalars(row).first()
            if pack_id is None:
                return  # another machine has just removed it
            query = select(PackKernelRow.position).filter_by(pack_id=pack_id)
            known = set(session.scalars(query))
            for position, kernel in enumerate(kernels):
                if kernel is not None and position not in known:
                    place = {"pack_id": pack_id, "position": position, "kernel_id": ids[kernel]}
                    insert_ignore(session, PackKernelRow, place)
        self._dictionary.keep(ids)

    def remove(self, pack_hash: str) -> None:
        """Forget a pack whose file is gone or damaged; winners no longer name it either."""
        with self._database.write() as session:
            known = delete(PackRow).where(PackRow.hash == pack_hash).returning(PackRow.bytes)
            size = session.scalar(known)
            session.execute(update(WinnerRow).where(WinnerRow.pack == pack_hash).values(pack=None))
            if size is not None:
                record(session, Action.PACK_REMOVED, pack_hash, actor=SYSTEM, bytes=size)

    def of_winners(self) -> set[str]:
        """Hashes that current winners name, and those of packs that hold their kernels."""
        named = select(WinnerRow.pack).where(WinnerRow.is_current, WinnerRow.pack.is_not(None))
        holding = (
            select(PackRow.hash)
            .join(PackKernelRow, PackKernelRow.pack_id == PackRow.id)
            .join(WinnerRow, WinnerRow.kernel_id == PackKernelRow.kernel_id)
            .where(WinnerRow.is_current)
            .distinct()
        )
        with self._database.read() as session:
            return {*filter(None, session.scalars(named)), *session.scalars(holding)}

    def holding(self, kernel_name: str) -> str | None:
        """Hash of the newest pack that holds the kernel."""
        with self._database.read() as session:
            return session.scalar(
                select(PackRow.hash)
                .join(PackKernelRow, PackKernelRow.pack_id == PackRow.id)
                .join(KernelRow, KernelRow.id == PackKernelRow.kernel_id)
                .where(KernelRow.name == kernel_name)
                .order_by(PackRow.id.desc())
                .limit(1)
            )

    def kernel(self, name: str) -> AnyKernel | None:
        with self._database.read() as session:
            stored = session.scalar(select(KernelRow.description).where(KernelRow.name == name))
            return None if stored is None else kernel_from_json(stored)
