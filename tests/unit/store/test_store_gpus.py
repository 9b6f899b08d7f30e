"""GPUs that report what runs on them, and the winners that grow stale by it, on each database."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from sqlalchemy import update

from tests.support.records import DEVICE, ENVIRONMENT, OTHER_DEVICE, PROBLEM, imported, winner
from tuner.store import Store
from tuner.store.gpus import SEEN_S
from tuner.store.models import GpuRow

NEWER = replace(ENVIRONMENT, driver="590.1")
OTHER = replace(PROBLEM, m=1)


def stale(store: Store, device: str = DEVICE.slug) -> bool:
    stored = store.winner(PROBLEM, device)
    assert stored is not None
    assert [stored] == store.winners(device=device) == store.near_winners(PROBLEM, device)
    assert store.history(PROBLEM, device)[0] == stored
    return stored.stale


def test_a_gpu_is_known_by_its_last_report(store: Store) -> None:
    assert store.gpus.known() == []
    store.gpus.report(DEVICE, ENVIRONMENT)
    store.gpus.report(DEVICE, NEWER)
    store.gpus.report(OTHER_DEVICE, replace(NEWER, gpu_uuid="GPU-2"))
    second, first = store.gpus.known()
    assert (first.uuid, first.device, first.environment) == ("GPU-1", DEVICE, NEWER)
    assert (second.uuid, second.device) == ("GPU-2", OTHER_DEVICE)
    assert abs(first.seen_at - time.time()) < 60


def test_without_gpus_nothing_is_stale(store: Store) -> None:
    assert not store.promote(winner()).stale
    assert not stale(store)
    store.gpus.report(OTHER_DEVICE, NEWER)  # of another model
    assert not stale(store)


@pytest.mark.parametrize("field", ["driver", "cuda", "cutlass", "cublas"])
def test_a_winner_of_other_software_is_stale(store: Store, field: str) -> None:
    store.promote(winner())
    store.gpus.report(DEVICE, replace(ENVIRONMENT, gpu_uuid="GPU-9", gemmsmith="9", torch="9"))
    assert not stale(store)
    store.gpus.report(DEVICE, replace(ENVIRONMENT, gpu_uuid="GPU-9", **{field: "9"}))
    assert stale(store)
    store.gpus.report(DEVICE, ENVIRONMENT)  # one GPU that agrees is enough
    assert not stale(store)


def test_gpus_that_are_silent_for_long_do_not_count(store: Store) -> None:
    store.promote(winner())
    store.gpus.report(DEVICE, NEWER)
    assert stale(store)
    with store.database.write() as session:
        session.execute(update(GpuRow).values(seen_at=time.time() - SEEN_S - 60))
    assert not stale(store)
    assert len(store.gpus.known()) == 1


def test_replayed_winners_are_never_stale_and_imported_ones_are(store: Store) -> None:
    store.gpus.report(DEVICE, NEWER)
    assert not store.promote(replace(winner(), replayed=True)).stale
    assert not stale(store)
    assert imported(store, winner()).stale
    assert stale(store)


def test_measuring_again_under_the_new_software_ends_it(store: Store) -> None:
    store.promote(winner())
    store.gpus.report(DEVICE, NEWER)
    again = store.promote(replace(winner(), environment=NEWER))  # with the very same figures
    assert (again.revision, again.stale) == (2, False)
    assert not stale(store)
    assert store.history(PROBLEM, DEVICE.slug)[1].stale


def test_what_the_store_says_of_a_winner_does_not_make_another_one(store: Store) -> None:
    store.promote(winner())
    store.gpus.report(DEVICE, NEWER)
    store.pin(PROBLEM, DEVICE.slug, 1)
    exported = store.winners()[0]
    assert (exported.stale, exported.pinned) == (True, True)
    assert imported(store, exported).revision == 1
    imported(store, replace(exported, problem=OTHER))
    elsewhere = store.winner(OTHER, DEVICE.slug)
    assert elsewhere is not None
    assert not elsewhere.pinned
