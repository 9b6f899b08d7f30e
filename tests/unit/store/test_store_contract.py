"""What every database must do alike: each test runs on SQLite and on PostgreSQL."""

from __future__ import annotations

import math
import time

import pytest

from gemmsmith.answers.answer import Ratio
from gemmsmith.core.config import Use
from gemmsmith.core.problem import DType, Layout, Problem
from tests.support.records import (
    DEVICE,
    ENVIRONMENT,
    OTHER_DEVICE,
    PROBLEM,
    candidate,
    failed_trial,
    imported,
    trial,
    winner,
)
from tests.support.replacing import replace
from tuner.errors import StoreError
from tuner.store import Store
from tuner.trial import AgainstRival, OnSpread, Phase

H200 = DEVICE.slug


def test_a_trial_comes_back_as_it_was(store: Store) -> None:
    store.add_trial(trial(1, job="j"))
    store.add_trial(failed_trial(2))
    measured, failed = (stored.trial for stored in store.trials())
    assert measured == trial(1, job="j")
    assert failed == failed_trial(2)
    assert failed.correctness is not None
    assert math.isinf(failed.correctness.error)


def test_a_reference_that_is_nan_is_kept(store: Store) -> None:
    broken = failed_trial()
    assert broken.correctness is not None
    broken = replace(broken, correctness=replace(broken.correctness, error=math.nan))
    store.add_trial(broken)
    kept = store.trials()[0].trial.correctness
    assert kept is not None
    assert math.isnan(kept.error)


def test_adding_a_trial_again_keeps_the_first(store: Store) -> None:
    first = store.add_trial(trial(1))
    assert store.add_trial(replace(trial(1), cost_s=99.0)) == first
    assert [stored.trial.cost_s for stored in store.trials()] == [0.25]


@pytest.mark.parametrize(
    "change",
    [
        {"problem": replace(PROBLEM, m=1)},
        {"device": OTHER_DEVICE},
        {"candidate": candidate(9)},
        {"candidate": replace(candidate(1), launch=replace(candidate(1).launch, swizzle=8))},
        {"phase": Phase.FINAL},
        {"environment": replace(ENVIRONMENT, driver="590")},
        {"job": "another"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_any_part_of_its_identity_makes_another_trial(
    store: Store, change: dict[str, object]
) -> None:
    first = store.add_trial(trial(1))
    assert store.add_trial(replace(trial(1), **change)) != first  # type: ignore[arg-type]
    assert store.counts()["trials"] == 2


def test_several_trials_are_added_together(store: Store) -> None:
    ids = store.add_trials([trial(1), trial(2), trial(1)])
    assert ids[0] == ids[2] != ids[1]
    assert store.add_trials([]) == []


def test_trials_are_filtered_and_paged(store: Store) -> None:
    fp16 = Problem(m=8, n=8, k=8, dtype=DType.FP16, layout=Layout.NT)
    store.add_trials([trial(n, job="a") for n in range(5)])
    store.add_trials([trial(n, fp16, job="b") for n in range(3)])
    assert len(store.trials(problem=fp16)) == 3
    assert len(store.trials(problem=replace(fp16, k=9))) == 0
    assert len(store.trials(dtype=DType.BF16)) == 5
    assert len(store.trials(layout=Layout.NT)) == 3
    assert len(store.trials(job="a", phase=Phase.SCREEN)) == 5
    assert len(store.trials(phase=Phase.FINAL)) == 0
    assert len(store.trials(device=H200)) == 8
    assert len(store.trials(device="nobody's")) == 0
    pages: list[int] = []
    while page := store.trials(after=pages[-1] if pages else None, limit=3):
        pages += [stored.id for stored in page]
    assert pages == [stored.id for stored in store.trials()]
    times = [stored.created_at for stored in store.trials()]
    assert times == sorted(times)
    assert abs(times[-1] - time.time()) < 60


def test_a_winner_comes_back_as_it_was(store: Store) -> None:
    kept = store.promote(replace(winner(), pack="abc"))
    assert kept.revision == 1
    assert kept.promoted_at
    assert store.winner(PROBLEM, H200) == kept
    assert replace(kept, revision=0, promoted_at="") == replace(winner(), pack="abc")
    assert store.winner(PROBLEM, OTHER_DEVICE.slug) is None
    assert store.winner(replace(PROBLEM, n=7), H200) is None


def test_what_cublas_ran_is_kept(store: Store) -> None:
    told = store.promote(replace(winner(), baseline_kernels=("Memset (Device)", "nvjet")))
    assert store.winner(PROBLEM, H200) == told
    assert told.baseline_kernels == ("Memset (Device)", "nvjet")


def test_what_power_costs_is_kept(store: Store) -> None:
    assert store.promote(winner()).power_penalty is None
    dear = store.promote(replace(winner(), power_penalty=1.05))
    assert store.winner(PROBLEM, H200) == dear
    assert (dear.power_penalty, dear.revision) == (1.05, 2)


def test_rivals_and_spreads_are_kept(store: Store) -> None:
    plain = store.promote(winner())
    assert plain.rivals == plain.spreads == ()
    told = replace(
        winner(),
        rivals=(
            AgainstRival(
                name="loop of torch.mm",
                median_us=12.0,
                speedup=Ratio(median=1.2, ci_low=1.1, ci_high=1.3),
            ),
        ),
        spreads=(OnSpread(spread="balanced", median_us=10.0, default_us=11.0),),
    )
    kept = store.promote(told)
    assert kept.revision == 2
    assert replace(kept, revision=0, promoted_at="") == told
    assert store.winner(PROBLEM, H200) == kept


def test_a_winner_without_any_candidate_is_kept(store: Store) -> None:
    bare = replace(
        winner(), use=Use.CUBLAS, candidate=None, statistics=None, speedup=None, correctness=None
    )
    assert store.promote(bare) == store.winner(PROBLEM, H200)


def test_history_is_kept_and_the_newest_is_current(store: Store) -> None:
    for us in (10.0, 9.0, 11.0):
        store.promote(winner(time=us))
    history = store.history(PROBLEM, H200)
    assert [entry.revision for entry in history] == [3, 2, 1]
    assert store.winner(PROBLEM, H200) == history[0]
    assert store.counts()["winners"] == 1


def test_promoting_what_is_current_changes_nothing(store: Store) -> None:
    first = store.promote(winner())
    before = store.sequence()
    assert store.promote(replace(winner(), job="another")).revision == first.revision
    assert store.sequence() == before
    assert store.promote(replace(winner(), pack="late")).pack == "late"
    assert len(store.history(PROBLEM, H200)) == 1


def test_a_replayed_winner_never_replaces_a_measured_one(store: Store) -> None:
    replayed = replace(winner(time=1.0), replayed=True)
    measured = store.promote(winner(time=10.0))
    assert store.promote(replayed).revision == 2
    assert store.winner(PROBLEM, H200) == measured
    other = replace(PROBLEM, m=1)
    store.promote(replace(replayed, problem=other))
    store.promote(winner(other, time=20.0))
    now = store.winner(other, H200)
    assert now is not None
    assert not now.replayed


def test_an_equal_winner_that_cannot_be_served_is_no_new_revision(store: Store) -> None:
    """A job that was stopped after its promotion promotes again when it begins again."""
    store.promote(winner(time=5.0))
    replayed = replace(winner(time=1.0), replayed=True)
    assert [store.promote(replayed).revision for _ in range(3)] == [2, 2, 2]
    other = replace(winner(time=2.0), replayed=True)
    assert [store.promote(item).revision for item in (other, replayed, other)] == [3, 4, 5]
    store.pin(PROBLEM, DEVICE.slug, 1)
    measured = winner(time=4.0)
    assert [store.promote(measured).revision for _ in range(2)] == [6, 6]


def test_an_imported_winner_stands_between_replayed_and_measured(store: Store) -> None:
    store.promote(replace(winner(time=5.0), replayed=True))
    shipped = imported(store, winner(time=10.0))
    assert store.winner(PROBLEM, H200) == shipped
    measured = store.promote(winner(time=11.0))
    assert imported(store, winner(time=10.0)).revision == shipped.revision
    imported(store, winner(time=9.0))
    assert store.winner(PROBLEM, H200) == measured
    assert len(store.history(PROBLEM, H200)) == 4


def test_a_pinned_revision_is_served_until_it_is_unpinned(store: Store) -> None:
    for us in (10.0, 9.0):
        store.promote(winner(time=us))
    pinned = store.pin(PROBLEM, H200, 1).winner
    assert pinned.revision == 1
    store.promote(winner(time=8.0))
    assert store.winner(PROBLEM, H200) == pinned
    assert store.unpin(PROBLEM, H200).winner.revision == 3
    now = store.winner(PROBLEM, H200)
    assert now is not None
    assert now.revision == 3
    with pytest.raises(StoreError, match="has no revision 7; it has 1, 2, 3"):
        store.pin(PROBLEM, H200, 7)
    with pytest.raises(StoreError, match="tune it first"):
        store.unpin(replace(PROBLEM, m=3), H200)


def test_the_sequence_grows_with_every_change_of_an_answer(store: Store) -> None:
    seen = [store.sequence()]
    store.promote(winner(time=10.0))
    seen.append(store.sequence())
    store.promote(winner(replace(PROBLEM, m=1)))
    seen.append(store.sequence())
    store.promote(winner(time=9.0))
    seen.append(store.sequence())
    store.pin(PROBLEM, H200, 1)
    seen.append(store.sequence())
    assert seen == sorted(set(seen))
    assert seen[0] == 0


def test_winners_are_listed_in_pages(store: Store) -> None:
    problems = [replace(PROBLEM, m=m) for m in (5, 3, 9, 1)]
    for problem in problems:
        store.promote(winner(problem))
    store.promote(winner(replace(PROBLEM, m=3), time=1.0))
    store.promote(winner(Problem(m=1, n=1, k=1, dtype=DType.FP16)))
    store.promote(replace(winner(), device=OTHER_DEVICE))
    first = store.winners(device=H200, dtype=DType.BF16, layout=Layout.TN, limit=3)
    rest = store.winners(device=H200, dtype=DType.BF16, after=first[-1].problem)
    assert [entry.problem for entry in [*first, *rest]] == problems
    assert len(store.winners()) == 6
    assert store.winners(layout=Layout.NN) == []


def test_near_winners_are_nearest_first(store: Store) -> None:
    shapes = [(256, 4096, 4096), (128, 4096, 4096), (256, 4096, 16384), (1, 1, 1), (4096, 4096, 64)]
    for m, n, k in shapes:
        store.promote(winner(Problem(m=m, n=n, k=k)))
    store.promote(winner(Problem(m=256, n=4096, k=4096, batch=2)))
    store.promote(winner(Problem(m=256, n=4096, k=4096, dtype=DType.FP16)))
    asked = Problem(m=200, n=4096, k=4096)

    def distance(shape: tuple[int, int, int]) -> float:
        return sum(
            (math.log2(a) - math.log2(b)) ** 2
            for a, b in zip(shape, (200, 4096, 4096), strict=True)
        )

    for limit in (1, 2, 3, 64):
        near = store.near_winners(asked, H200, limit)
        found = [(entry.problem.m, entry.problem.n, entry.problem.k) for entry in near]
        assert found == sorted(shapes, key=distance)[:limit]
    assert store.near_winners(asked, OTHER_DEVICE.slug) == []
    for reach in (0.0, 0.5, 1.5, 4.0, 6.0):
        within = [w for w in store.near_winners(asked, H200) if asked.distance(w.problem) <= reach]
        assert store.near_winners(asked, H200, reach=reach) == within


def test_all_winners_of_an_order_are_near(store: Store) -> None:
    """Any of them may answer, also one of another weight or batch."""
    asked = Problem(m=200, n=4096, k=4096, dtype="bf16.sum_sequential")
    others = [replace(asked, m=1), replace(asked, n=8, k=8), replace(asked, batch=3)]
    for problem in (*others, replace(asked, dtype="bf16"), replace(asked, layout=Layout.TT)):
        store.promote(winner(problem))
    near = [entry.problem for entry in store.near_winners(asked, H200, limit=1, reach=0.5)]
    assert near == sorted(others, key=asked.distance)


def test_packs_know_their_kernels(store: Store) -> None:
    kernels = [candidate(n).kernel for n in range(3)]
    store.add_pack("old", "toolchain", kernels, 1000)
    store.add_pack("new", "toolchain", kernels[:2], 900)
    store.add_pack("new", "toolchain", kernels[:2], 900)
    assert store.pack_for("kernel_0") == "new"
    assert store.pack_for("kernel_2") == "old"
    assert store.pack_for("kernel_9") is None
    assert store.kernel("kernel_1") == kernels[1]
    assert store.kernel("kernel_9") is None
    store.remove_pack("new")
    assert store.pack_for("kernel_0") == "old"


def test_a_pack_from_elsewhere_is_recorded_as_far_as_its_kernels_are_known(store: Store) -> None:
    kernels = [candidate(n).kernel for n in range(3)]
    store.add_pack("hash", "toolchain", [None, kernels[1], None], 1000)
    assert store.pack_for("kernel_1") == "hash"
    assert store.pack_for("kernel_0") is None
    store.add_pack("hash", "toolchain", [kernels[0], kernels[1], None], 1000)
    assert store.pack_for("kernel_0") == store.pack_for("kernel_1") == "hash"
    assert store.pack_for("kernel_2") is None


def test_winners_packs_are_those_they_name_and_those_of_their_kernels(store: Store) -> None:
    promoted = store.promote(winner())
    assert promoted.candidate is not None
    store.add_pack("of its kernel", "toolchain", [promoted.candidate.kernel], 1000)
    store.add_pack("of another", "toolchain", [candidate(9).kernel], 1000)
    store.promote(replace(winner(), device=OTHER_DEVICE, pack="named"))
    assert store.winners_packs() == {"of its kernel", "named"}
    store.remove_pack("named")
    assert store.winners_packs() == {"of its kernel"}


def test_devices_environments_and_counts(store: Store) -> None:
    store.add_trial(trial())
    store.promote(replace(winner(), device=OTHER_DEVICE))
    assert store.devices() == [OTHER_DEVICE, DEVICE]
    assert store.environments() == [ENVIRONMENT]
    counts = store.counts()
    assert {name: counts[name] for name in ("devices", "problems", "trials", "winners")} == {
        "devices": 2,
        "problems": 1,
        "trials": 1,
        "winners": 1,
    }


def test_what_another_process_wrote_is_seen(store: Store, store_url: str) -> None:
    with Store.open(store_url) as other:
        other.add_trial(trial(1))
        other.promote(winner())
    assert len(store.trials()) == 1
    assert store.add_trial(trial(1)) == store.trials()[0].id
    assert store.winner(PROBLEM, H200) is not None
