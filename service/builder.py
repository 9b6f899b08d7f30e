"""A builder that also records its packs in the store, so that answers can name them.

A shipped winner has no pack of its own; once its kernel is compiled here for whatever reason,
`GET /best` says in which pack.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing

from gemmsmith.kernel import Kernel
from service.settings import Settings
from tuner.compile import ArtifactStore, Builder, Built, Pack, Toolchain, find_toolchain
from tuner.store import Store


class RecordingBuilder(Builder):
    """Builds kernels and records the packs that hold them."""

    def __init__(
        self,
        artifacts: ArtifactStore,
        toolchain: Toolchain,
        records: Store,
        workers: int | None = None,
    ) -> None:
        super().__init__(artifacts, toolchain, workers=workers)
        self._records = records
        self._recorded: set[str] = set()

    def build(self, kernels: Sequence[Kernel]) -> Iterator[Built]:
        """See `Builder.build`."""
        known = {kernel.name: kernel for kernel in kernels}
        # Closed with this generator, so that abandoned compilers are killed at once.
        with closing(super().build(kernels)) as results:  # type: ignore[type-var]
            for built in results:
                if built.pack is not None and built.pack.hash not in self._recorded:
                    self._record(built.pack, known)
                yield built

    def _record(self, pack: Pack, known: dict[str, Kernel]) -> None:
        held = [known.get(name) or self._records.kernel(name) for name in pack.kernels]
        kernels = [kernel for kernel in held if kernel is not None]
        # A pack from elsewhere may hold kernels that nothing here has ever described.
        if len(kernels) == len(held):
            self._records.add_pack(
                pack.hash, self.toolchain.digest, kernels, pack.path.stat().st_size
            )
        self._recorded.add(pack.hash)


def open_builder(settings: Settings, records: Store, workers: int | None = None) -> Builder:
    """The compile pool over the packs folder.

    Raises:
        CompilerNotFound: no nvcc; the message says how to get one.
    """
    return RecordingBuilder(ArtifactStore(settings.packs), find_toolchain(), records, workers)
