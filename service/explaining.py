"""Explains a winner with what this installation has of its compiled kernel."""

from __future__ import annotations

from tuner.compile import ArtifactStore
from tuner.explain import Explanation, explain
from tuner.profiling.files import profile_of
from tuner.store import Store
from tuner.trial import Winner

NEAR = 8
"""Tuned neighbours among which a padded problem is looked for: such a one is among the nearest."""


def explanation_of(winner: Winner, store: Store, artifacts: ArtifactStore) -> Explanation:
    """The explanation, with registers and spills if a pack of the kernel is here.

    Only packs that may be handed on are read. A damaged pack counts as missing.
    """
    near = store.near_winners(winner.problem, winner.device.slug, limit=NEAR)
    profile = profile_of(winner.problem, winner.device.slug)
    if winner.candidate is not None:
        for pack_hash in (winner.pack, store.pack_for(winner.candidate.kernel.name)):
            if pack_hash and artifacts.believes(pack_hash) and (pack := artifacts.get(pack_hash)):
                return explain(winner, pack.path, near, profile)
    return explain(winner, near=near, profile=profile)
