"""Explains a winner with what this installation has of its compiled kernel."""

from __future__ import annotations

from functools import partial

from tuner.compile import ArtifactStore
from tuner.explain import Explanation, explain
from tuner.explain.advice import alternatives
from tuner.profiling.files import profile_of
from tuner.store import Store
from tuner.trial import Winner

NEAR = 8
"""Tuned neighbours among which larger problems are searched: such a one is among the nearest."""


def explanation_of(winner: Winner, store: Store, artifacts: ArtifactStore) -> Explanation:
    """The explanation, with registers and spills if a pack of the kernel is here.

    Only packs that may be handed on are read. A damaged pack counts as missing.
    """
    problem, slug = winner.problem, winner.device.slug
    near = store.near_winners(problem, slug, limit=NEAR)
    near += store.winners_of(alternatives(problem), slug)
    explained = partial(
        explain,
        winner,
        near=near,
        tried={trial.kernel.name for trial in store.tried_on(problem, slug)},
        profile=profile_of(problem, slug),
    )
    if winner.candidate is not None:
        for pack_hash in (winner.pack, store.pack_for(winner.candidate.kernel.name)):
            if pack_hash and artifacts.believes(pack_hash) and (pack := artifacts.get(pack_hash)):
                return explained(pack=pack.path)
    return explained()
