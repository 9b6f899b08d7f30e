"""Which kernels are compiled, and in which pack; the packs' bytes are in the artifact store."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import delete, select

from gemmsmith.kernel import Kernel
from tuner.store.clock import now
from tuner.store.codec import from_json
from tuner.store.database import Database
from tuner.store.dictionary import Dictionary
from tuner.store.models import KernelRow, PackKernelRow, PackRow
from tuner.store.upsert import insert_ignore


class Packs:
    """The tables of packs and their kernels."""

    def __init__(self, database: Database, dictionary: Dictionary) -> None:
        self._database = database
        self._dictionary = dictionary

    def add(self, pack_hash: str, toolchain: str, kernels: Sequence[Kernel], size: int) -> None:
        """Record a pack of `size` bytes, kernels in its own order; again does nothing."""
        with self._database.write() as session:
            ids = self._dictionary.ids(session, kernels)
            values = {
                "hash": pack_hash,
                "toolchain": toolchain,
                "bytes": size,
                "created_at": now(),
            }
            pack_id = insert_ignore(session, PackRow, values)
            if pack_id is not None:
                session.add_all(
                    PackKernelRow(pack_id=pack_id, position=position, kernel_id=ids[kernel])
                    for position, kernel in enumerate(kernels)
                )
        self._dictionary.keep(ids)

    def remove(self, pack_hash: str) -> None:
        """Forget a pack whose file is gone or damaged."""
        with self._database.write() as session:
            session.execute(delete(PackRow).where(PackRow.hash == pack_hash))

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

    def kernel(self, name: str) -> Kernel | None:
        """The description of a kernel that any trial, winner or pack has named."""
        with self._database.read() as session:
            stored = session.scalar(select(KernelRow.description).where(KernelRow.name == name))
            return None if stored is None else from_json(Kernel, stored)
