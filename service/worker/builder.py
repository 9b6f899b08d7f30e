"""A builder that also records its packs in the store, so that answers can name them.

A shipped winner has no pack of its own; once its kernel is compiled here, or taken from another
service, for whatever reason, `GET /best` says in which pack.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import structlog

from gemmsmith.core.kernel import AnyKernel
from gemmsmith.signing import Purpose
from gemmsmith.winners import installed
from service import identity
from service.settings import Settings
from tuner.compile import (
    ArtifactStore,
    Builder,
    Built,
    Pack,
    SizeLimit,
    Toolchain,
    find_toolchain,
)
from tuner.compile.installed import TakenIn, take
from tuner.store import Store
from tuner.trial import Failure, FailureKind

log = structlog.get_logger("gemmsmith.winners.packs")


@dataclass(kw_only=True)
class Tally:
    """How kernels were come by: `compile_s` is the wall time of compiler runs, which overlap."""

    found: int = 0
    compiled: int = 0
    failed: int = 0
    compile_s: float = 0.0


class RecordingBuilder(Builder):
    """Builds kernels and records the packs that hold them.

    Attributes:
        records: where the packs are recorded; a worker puts each job's fenced store here.
        tally: of what was built; whoever wants to start anew puts a new one here.
    """

    def __init__(
        self,
        artifacts: ArtifactStore,
        toolchain: Toolchain,
        records: Store,
        workers: int | None = None,
    ) -> None:
        super().__init__(artifacts, toolchain, workers=workers)
        self.records = records
        self._recorded: set[str] = set()
        self.tally = Tally()

    def build(self, kernels: Sequence[AnyKernel]) -> Iterator[Built]:
        """See `Builder.build`."""
        known = {kernel.name: kernel for kernel in kernels}
        fresh: set[str] = set()
        # Closed with this generator, so that abandoned compilers are killed at once.
        with closing(super().build(kernels)) as results:  # type: ignore[type-var]
            for built in results:
                pack = built.pack
                self._count(built)
                if pack is not None and not built.cached and pack.hash not in fresh:
                    # It may have been here before, recorded, and evicted.
                    fresh.add(pack.hash)
                    self._recorded.discard(pack.hash)
                    self.tally.compile_s += built.seconds
                if pack is not None and pack.hash not in self._recorded:
                    record(self.records, pack, known)
                    self._recorded.add(pack.hash)
                yield built

    def _count(self, built: Built) -> None:
        if built.cached:
            self.tally.found += 1
        elif built.pack is not None:
            self.tally.compiled += 1
        else:
            self.tally.failed += 1
            self.tally.compile_s += built.seconds


def record(records: Store, pack: Pack, known: Mapping[str, AnyKernel]) -> None:
    """Record a pack of the packs folder, so that lookups can name it.

    `known` kernels, by name, are those that the store may not have met yet.
    """
    held = [
        None if name is None else known.get(name) or records.kernel(name) for name in pack.kernels
    ]
    records.add_pack(pack.hash, pack.toolchain, held, pack.path.stat().st_size)


class WithoutCompiler:
    """In a builder's place where nothing can be compiled: gives what the packs folder holds.

    `reason` says why there is no toolchain, and how to get one.
    """

    def __init__(self, artifacts: ArtifactStore, records: Store, reason: str) -> None:
        self.store = artifacts
        self._records = records
        self._reason = reason

    def build(self, kernels: Sequence[AnyKernel]) -> Iterator[Built]:
        """The newest pack of each kernel, whatever toolchain built it; else a failure."""
        known = {kernel.name: kernel for kernel in kernels}
        recorded: set[str] = set()
        for kernel in known.values():
            pack = self.store.find(kernel)
            if pack is None:
                message = f"in no pack here or at the service, and not compiled: {self._reason}"
                failure = Failure(kind=FailureKind.COMPILE, message=message)
                yield Built(kernel=kernel, failure=failure)
                continue
            if pack.hash not in recorded:
                record(self._records, pack, known)
                recorded.add(pack.hash)
            yield Built(kernel=kernel, pack=pack, cached=True)


def open_artifacts(settings: Settings, records: Store) -> ArtifactStore:
    """The packs folder, held to its limit; winners' packs stay, and the store forgets what goes.

    Packs that were installed with pip are in it from then on, and known to the store. What is
    published there is signed with the installation's key; what nobody who is believed has signed is
    not found, unless `unsigned` is set.

    Raises:
        SettingsError: the keys cannot be used.
    """
    limit = SizeLimit(
        bytes=int(settings.packs_limit_gb * 1e9),
        keep=records.winners_packs,
        evicted=records.remove_pack,
    )
    signer = identity.signer(settings)
    trusted = identity.trusted_packs(settings)
    artifacts = ArtifactStore(settings.packs, limit=limit, signer=signer, trusted=trusted)
    if folders := installed.folders():
        taken = take(
            artifacts,
            folders,
            trusted=trusted,
            shipped=identity.shipped(settings, Purpose.PACK),
            signer=signer,
        )
        _record_installed(artifacts, records, folders, taken)
    return artifacts


def _record_installed(
    artifacts: ArtifactStore, records: Store, folders: Sequence[Path], taken: Iterable[TakenIn]
) -> None:
    """Record the packs that were installed with pip, and report those that are not used."""
    refused = [item for item in taken if item.pack is None]
    if refused:
        log.warning(
            "installed packs are not used",
            packs=len(refused),
            first=refused[0].path.name,
            reason=refused[0].refusal,
        )
    recorded = {pack_hash for pack_hash, _ in records.changes.packed()}
    for path in (path for folder in folders for path in folder.glob("*.json")):
        pack = None if path.stem in recorded else artifacts.get(path.stem)
        if pack is not None:
            record(records, pack, {})


def open_builder(
    settings: Settings, records: Store, workers: int | None = None
) -> RecordingBuilder:
    """The compile pool over the packs folder.

    Raises:
        CompilerNotFound: no nvcc; the message says how to get one.
        SettingsError: the keys cannot be used.
    """
    return RecordingBuilder(open_artifacts(settings, records), find_toolchain(), records, workers)
