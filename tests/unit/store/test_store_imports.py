"""Winners of other installations in the store, and rows that somebody altered; on each database."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs
from sqlalchemy import select, update

from gemmsmith.answers.history import Origin
from gemmsmith.core.kernel import AnyKernel, Cutlass3xKernel
from gemmsmith.core.problem import Problem
from gemmsmith.signing import Signer, Trusted
from tests.support.replacing import replace
from tests.support.serving import H200, winner
from tuner.errors import NoSuchRevision
from tuner.store import Store
from tuner.store.codec import to_json
from tuner.store.imports import Foreign, Taken
from tuner.store.models import KernelRow, WinnerRow
from tuner.store.statement import altered, fingerprint, is_intact, signed
from tuner.store.winners import entries
from tuner.trial import Winner

KNOWN = Problem(m=4096, n=4096, k=4096)
OTHERS = [Problem(m=64 * m, n=4096, k=4096) for m in range(1, 30)]


def foreign(*winners: Winner, believed: bool = True) -> list[Foreign]:
    return [Foreign(winner=w, digest=fingerprint(w), believed=believed) for w in winners]


def take(store: Store, *winners: Winner, believed: bool = True, unsigned: bool = False) -> Taken:
    named = {entry for found in winners for entry in entries(found)} - {w.problem for w in winners}
    return store.imports.take([foreign(*winners, believed=believed)], named, unsigned=unsigned)  # type: ignore[arg-type]


def kernel_of(found: Winner) -> AnyKernel:
    assert found.candidate is not None
    return found.candidate.kernel


def describe(store: Store, kernel: AnyKernel, stored: object) -> None:
    with store.database.write() as session:
        there = update(KernelRow).where(KernelRow.name == kernel.name)
        session.execute(there.values(description=stored))
    store.forget_kernels()


def described(store: Store, kernel: AnyKernel) -> Any:
    with store.database.read() as session:
        query = select(KernelRow.description).where(KernelRow.name == kernel.name)
        return session.scalar(query)


def test_many_are_taken_at_once_and_each_in_a_sequence_of_its_own(store: Store) -> None:
    before = store.sequence()
    taken = take(store, *map(winner, OTHERS))
    assert taken == Taken(added=len(OTHERS), written=len(OTHERS))
    assert [found.problem for found in store.winners()] == OTHERS
    assert all(is_intact(found) for found in store.winners())
    changed = store.changes.winners_since(before, 100)
    assert [problem for _, problem in changed] == OTHERS
    assert store.sequence() == before + len(OTHERS)
    # A second file: half of them are news, and take the places of what was imported before.
    faster = [winner(problem, us=5.0) for problem in OTHERS[::2]]
    assert take(store, *faster, *map(winner, OTHERS[1::2])).added == len(faster)
    assert {found.revision for found in store.winners()} == {1, 2}


def test_what_fails_half_way_has_changed_nothing(store: Store) -> None:
    def batches() -> Iterator[list[Foreign]]:
        yield foreign(*map(winner, OTHERS))
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="gone"):
        store.imports.take(batches(), [], unsigned=False)
    assert store.counts()["problems"] == 0
    assert take(store, *map(winner, OTHERS)).added == len(OTHERS)


def test_a_pinned_winner_and_one_measured_here_stay(store: Store) -> None:
    store.promote(winner(OTHERS[0]))
    take(store, winner(OTHERS[1]))
    store.pin(OTHERS[1], H200.slug, 1)
    before = store.winners()
    assert take(store, *(winner(problem, us=1.0) for problem in OTHERS[:2])).added == 0
    assert store.winners() == before


def test_nobodys_word_cannot_be_pinned_and_does_not_come_back(store: Store) -> None:
    take(store, winner(KNOWN, us=1.0), believed=False)
    with pytest.raises(NoSuchRevision, match="no trusted signature"):
        store.pin(KNOWN, H200.slug, 1)
    mine = store.promote(winner(KNOWN))
    store.pin(KNOWN, H200.slug, 2)
    assert store.unpin(KNOWN, H200.slug).winner == mine


def test_a_forged_description_heals_by_importing_the_right_one(store: Store) -> None:
    stored = winner(KNOWN)
    kernel = kernel_of(stored)
    assert isinstance(kernel, Cutlass3xKernel)
    take(store, stored)
    other = kernel_of(winner(Problem(m=64, n=4096, k=4096, dtype="fp16")))
    for forged in (
        to_json(structs.replace(kernel, tile=(64, 64, 64))),
        to_json(other),
        {"backend": "nonsense"},
    ):
        describe(store, kernel, forged)
        assert not is_intact(_current(store))
        before = store.sequence()
        assert store.imports.misdescribed([kernel])
        take(store, stored)  # known already: nothing but the kernel changes
        assert _current(store) == replace(
            stored, revision=1, promoted_at=_current(store).promoted_at
        )
        assert is_intact(_current(store))
        assert store.sequence() == before + 1  # whoever keeps the answer is told
        assert not store.imports.misdescribed([kernel])


def test_so_does_it_by_measuring_and_never_by_another_forgery(store: Store) -> None:
    stored = winner(KNOWN)
    kernel = kernel_of(stored)
    store.promote(stored)
    forged = structs.replace(kernel, alignment_a=1)
    describe(store, kernel, to_json(forged))
    lie = replace(
        stored, candidate=replace(stored.candidate, kernel=structs.replace(kernel, stages=9))
    )
    store.promote(lie)
    assert described(store, kernel) == to_json(forged)
    store.promote(winner(KNOWN, us=5.0))
    assert described(store, kernel) == to_json(kernel)


@pytest.mark.parametrize(
    "values",
    [
        {"launch": {"splits": 3}},
        {"use": "cublas"},
        {"use": "whatever"},
        {"origin": "nowhere"},
        {"record": {}},
        {"launch": None},
        {"kernel_id": None},
        {"digest": "0" * 32},
        {"signature": {"key": 5}},
    ],
    ids=str,
)
def test_an_altered_row_is_told_from_a_whole_one(values: dict[str, Any], store: Store) -> None:
    store.promote(winner(KNOWN))
    assert is_intact(_current(store))
    with store.database.write() as session:
        session.execute(update(WinnerRow).values(**values))
    assert not is_intact(_current(store))
    assert altered(_current(store), Trusted()) == "it was altered in the database"


def test_figures_within_a_record_count_too(store: Store) -> None:
    store.promote(winner(KNOWN))
    with store.database.write() as session:
        row = session.scalars(select(WinnerRow)).one()
        text = msgspec.json.encode(row.record).replace(b'"repeatable":true', b'"repeatable":false')
        row.record = msgspec.json.decode(text)
    assert not is_intact(_current(store))


def test_another_drivers_description_of_a_gpu_is_no_alteration(store: Store) -> None:
    store.promote(winner(OTHERS[0]))
    other = replace(H200, memory_bytes=H200.memory_bytes - 2**20)
    store.promote(winner(KNOWN, device=other))
    assert _current(store).device == other
    assert is_intact(_current(store))


def test_a_whole_number_of_microseconds_is_no_alteration(store: Store, tmp_path: Path) -> None:
    """What a device reports as 10 is read back as 10.0."""
    signer = Signer.create(tmp_path / "signing.key")
    found = winner(KNOWN)
    assert found.statistics is not None
    found = replace(found, statistics=replace(found.statistics, median_us=10))
    store.promote(signed(found, signer))
    assert altered(_current(store), Trusted([signer.public])) is None


def test_a_digest_computed_anew_does_not_make_a_signature(store: Store, tmp_path: Path) -> None:
    signer = Signer.create(tmp_path / "signing.key")
    trusted = Trusted([signer.public])
    store.promote(signed(winner(KNOWN), signer))
    assert altered(_current(store), trusted) is None
    store.promote(replace(winner(KNOWN, us=1.0), signature=_current(store).signature))
    assert is_intact(_current(store))
    assert "altered" in (altered(_current(store), trusted) or "")


def test_origins_are_told(store: Store) -> None:
    take(store, winner(OTHERS[0]), winner(OTHERS[1]))
    take(store, winner(OTHERS[2]), believed=False, unsigned=True)
    store.promote(winner(OTHERS[3]))
    store.promote(replace(winner(OTHERS[4]), replayed=True))
    assert [found.origin for found in store.winners()] == [
        *(Origin.IMPORTED, Origin.IMPORTED, Origin.UNSIGNED),
        *(Origin.MEASURED, Origin.REPLAYED),
    ]


def _current(store: Store) -> Winner:
    stored = store.winner(KNOWN, H200.slug)
    assert stored is not None
    return stored
