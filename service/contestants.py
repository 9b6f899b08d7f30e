"""What `gemmsmith profile` launches: the winner's candidate and runners-up, with their packs."""

from __future__ import annotations

from pathlib import Path

from gemmsmith.core.candidate import Candidate
from service.settings import Settings
from service.worker.builder import open_artifacts, open_builder
from tuner.errors import CompileFailed
from tuner.store import Store
from tuner.trial import Winner

_RANKED = 50
"""Trials among which runners-up are looked for."""


def contestants(
    winner: Winner, store: Store, settings: Settings, runners_up: int
) -> list[tuple[Candidate, Path]]:
    """The winner's candidate, which is compiled if it has no pack, and compiled runners-up.

    Raises:
        CompilerNotFound: it has no pack, and there is no nvcc.
        CompileFailed: it has no pack, and does not compile.
        SettingsError: the keys cannot be used.
    """
    if winner.candidate is None:
        return []
    artifacts = open_artifacts(settings, store)
    chosen = winner.candidate
    pack = artifacts.find(chosen.kernel)
    if pack is None:
        [built] = open_builder(settings, store).build([chosen.kernel])
        if built.pack is None:
            raise CompileFailed(built.failure.message if built.failure else chosen.kernel.name)
        pack = built.pack
    contestants = [(chosen, pack.path)]
    for stored in store.listing.ranking(winner.problem, winner.device.slug, _RANKED).measured:
        candidate = stored.trial.candidate
        if len(contestants) > runners_up:
            break
        if candidate.key != chosen.key and (other := artifacts.find(candidate.kernel)):
            contestants.append((candidate, other.path))
    return contestants
