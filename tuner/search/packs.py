"""The packs of one tuning run's kernels: built before they are needed, whole when they are used.

A pack may be damaged or removed after it was built (a disk, a clean-up, somebody's hand). It is
looked at again before a candidate is measured, and built anew then; what a candidate does out of a
damaged pack says nothing about the candidate.
"""

from __future__ import annotations

from gemmsmith.core.candidate import Candidate
from tuner.compile import Builder, Built
from tuner.devices.base import Contender


class RunPacks:
    """What was built so far. `builder` is None where the device needs no packs."""

    def __init__(self, builder: Builder | None) -> None:
        self._builder = builder
        self._built: dict[str, Built] = {}

    def __len__(self) -> int:
        return len(self._built)

    def add(self, built: Built) -> None:
        """Note what became of a kernel."""
        self._built[built.kernel.name] = built

    def hash(self, candidate: Candidate) -> str | None:
        """Hash of the pack that the candidate runs out of, if it has one."""
        built = self._built.get(candidate.kernel.name)
        return built.pack.hash if built is not None and built.pack is not None else None

    def is_damaged(self, candidate: Candidate) -> bool:
        """Whether the candidate's pack was built, and is not whole any more or gone."""
        pack_hash = self.hash(candidate)
        if pack_hash is None or self._builder is None:
            return False
        return self._builder.store.get(pack_hash, afresh=True) is None

    def contender(self, candidate: Candidate) -> Contender:
        """The candidate with its pack, which is built where that was not done or was in vain.

        Not while the builder is at work.
        """
        if self._builder is None:
            return Contender(candidate=candidate)
        if candidate.kernel.name not in self._built or self.is_damaged(candidate):
            self.add(next(iter(self._builder.build([candidate.kernel]))))
        return self.as_built(candidate)

    def as_built(self, candidate: Candidate) -> Contender:
        """The candidate with the pack that was built for it, looked at or not."""
        built = self._built.get(candidate.kernel.name)
        pack = built.pack if built is not None else None
        return Contender(candidate=candidate, pack=pack.path if pack else None)
