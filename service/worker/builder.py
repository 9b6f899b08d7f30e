"""A builder that also records its packs in the store, so that answers can name them.

A shipped winner has no pack of its own. Once its kernel was compiled here for any job, or taken
from another service, `GET /best` names the pack.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass

from gemmsmith.core.kernel import AnyKernel
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
from tuner.errors import LeaseLost, StoreError
from tuner.jobs import LeasedJob
from tuner.store import Store
from tuner.trial import Failure, FailureKind


@dataclass(kw_only=True)
class Tally:
    """How many kernels were in packs already, compiled, or not compilable.

    `compile_s` is the sum of the compiler runs' times, which overlap.
    """

    found: int = 0
    compiled: int = 0
    failed: int = 0
    compile_s: float = 0.0


class RecordingBuilder(Builder):
    """Builds kernels and records the packs that hold them.

    Attributes:
        records: where packs are recorded. A worker sets each job's fenced store here.
        tally: counts what was built since the last report.
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
        # Closed with this generator, so that compilers of an abandoned build are killed at once.
        with closing(super().build(kernels)) as results:  # type: ignore[type-var]
            for built in results:
                pack = built.pack
                self._count(built)
                if pack is not None and not built.cached and pack.hash not in fresh:
                    # A recorded pack may have been evicted; compiled again, it is recorded again.
                    fresh.add(pack.hash)
                    self._recorded.discard(pack.hash)
                    self.tally.compile_s += built.seconds
                if pack is not None and pack.hash not in self._recorded:
                    record(self.records, pack, known)
                    self._recorded.add(pack.hash)
                yield built

    def report(self, leased: LeasedJob) -> None:
        """Record for `/metrics` what was built since the last report, also after a failure."""
        tally, self.tally = self.tally, Tally()
        if tally != Tally():
            with suppress(LeaseLost, StoreError):  # a job must not fail for want of these figures
                leased.event("built", asdict(tally))

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

    `known` has kernels by name that may not be in the store yet.
    """
    kernels = [
        None if name is None else known.get(name) or records.kernel(name) for name in pack.kernels
    ]
    records.add_pack(pack.hash, pack.toolchain, kernels, pack.path.stat().st_size)


class WithoutCompiler:
    """A builder for machines without a compiler: its kernels come from the packs folder.

    `reason` says why there is no compiler, and how to get one.
    """

    def __init__(self, artifacts: ArtifactStore, records: Store, reason: str) -> None:
        self.store = artifacts
        self._records = records
        self._reason = reason

    def build(self, kernels: Sequence[AnyKernel]) -> Iterator[Built]:
        """Yield the newest pack of each kernel, of any toolchain, or a failure."""
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
    """Open the packs folder, with its size limit.

    Packs beyond the limit are removed from the folder and from the store, but never those of
    winners. New packs are signed with the installation's key. Packs that no trusted key has signed
    are not used, unless `unsigned` is set.

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
    return ArtifactStore(settings.packs, limit=limit, signer=signer, trusted=trusted)


def open_builder(
    settings: Settings, records: Store, workers: int | None = None
) -> RecordingBuilder:
    """Open a compile pool over the packs folder.

    Raises:
        CompilerNotFound: there is no nvcc; the message says how to get it.
        SettingsError: the keys cannot be used.
    """
    return RecordingBuilder(open_artifacts(settings, records), find_toolchain(), records, workers)
