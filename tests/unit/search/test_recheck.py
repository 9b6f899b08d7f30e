"""Re-checks: what they measure again, on a recording that plays a GPU with newer software."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.config import Use
from gemmsmith.core.problem import Problem
from gemmsmith.core.tuning import Effort
from tests.support import fake_nvcc
from tests.support.gpu import NEWER, Gpu
from tests.support.recordings import best_of, some_candidates
from tests.support.replacing import replace
from tests.support.serving import ENVIRONMENT, H200
from tests.support.serving import winner as winner_of
from tests.unit.devices.conftest import DeviceFactory
from tests.unit.devices.conftest import fake_device as fake_device
from tests.unit.devices.fake_child import ENVIRONMENT as FAKE_ENVIRONMENT
from tests.unit.devices.fake_child import MODEL
from tuner.backends import candidates
from tuner.compile import ArtifactStore, Builder
from tuner.devices.base import Contender
from tuner.errors import JobAborted
from tuner.measure.policy import Policy
from tuner.search.finals import top_candidates
from tuner.search.run import TuningRun
from tuner.store import Store
from tuner.trial import Finals, Phase, Trial, Winner

PROBLEM = Problem(m=256, n=4096, k=4096)


class Compiling(Gpu):
    """The same, which wants its kernels compiled, and then looks nothing up in their packs."""

    needs_packs = True

    def finals(self, problem: Problem, contenders: Sequence[Contender], policy: Policy) -> Finals:
        without = [c.candidate for c in contenders if c.pack is None]
        held = super().finals(problem, [c for c in contenders if c.pack is not None], policy)
        failure = super().finals(problem, [Contender(candidate=FAILS)], policy).failures[0][1]
        return replace(held, failures=(*held.failures, *((each, failure) for each in without)))


FAILS = some_candidates(PROBLEM)[0]  # `record` has it refused


@pytest.fixture
def store(sqlite_url: str) -> Iterator[Store]:
    with Store.open(sqlite_url) as opened:
        yield opened


@pytest.fixture
def gpu(tmp_path: Path) -> Gpu:
    return Gpu(tmp_path / "sweeps", PROBLEM)


def recheck(device: Gpu, store: Store, **options: object) -> Winner:
    chosen = {"builder": None, "effort": Effort.RECHECK, **options}
    return TuningRun(problem=PROBLEM, device=device, store=store, **chosen).tune()  # type: ignore[arg-type]


def tuned(store: Store, candidate: Candidate, **fields: object) -> Winner:
    """A winner that was measured some time ago, and is stale on `gpu`."""
    store.promote(replace(winner_of(PROBLEM), candidate=candidate, **fields))  # type: ignore[arg-type]
    store.gpus.report(H200, NEWER)
    stored = store.winner(PROBLEM, H200.slug)
    assert stored is not None
    assert stored.stale
    return stored


def trial(candidate: Candidate, us: float, phase: Phase = Phase.SCREEN) -> Trial:
    statistics = winner_of(PROBLEM, us=us).statistics
    return Trial(
        problem=PROBLEM,
        candidate=candidate,
        device=H200,
        environment=ENVIRONMENT,
        phase=phase,
        statistics=statistics,
        job=f"{phase} {us}",
    )


def test_the_winner_comes_first_then_its_ties_finalists_and_the_best_screened(
    store: Store,
) -> None:
    field = some_candidates(PROBLEM)
    store.add_trials([trial(c, 10.0 + i) for i, c in enumerate(reversed(field))])
    store.add_trial(trial(field[4], 9.0, Phase.FINAL))
    store.add_trial(trial(field[5], 8.0, Phase.FINAL))
    store.promote(replace(winner_of(PROBLEM), candidate=field[2], ties=(field[3].key, "gone@x")))
    chosen = top_candidates(store, PROBLEM, H200.slug, field, 8)
    assert chosen == [field[i] for i in (2, 3, 5, 4, 7, 6, 1, 0)]
    assert top_candidates(store, PROBLEM, H200.slug, field, 3) == chosen[:3]
    failing = replace(trial(field[3], 1.0), statistics=None, failure=None, job="later")
    store.add_trial(failing)
    assert field[3] not in top_candidates(store, PROBLEM, H200.slug, field, 8)
    assert top_candidates(store, PROBLEM, H200.slug, field[3:], 8) == []
    assert top_candidates(store, replace(PROBLEM, m=1), H200.slug, field, 8) == []


def test_the_same_winner_is_promoted_with_the_new_environment(gpu: Gpu, store: Store) -> None:
    old = tuned(store, best_of(PROBLEM), ties=(some_candidates(PROBLEM)[1].key,))
    winner = recheck(gpu, store, job="j")
    assert (winner.candidate, winner.revision, winner.stale) == (old.candidate, 2, False)
    assert winner.environment == NEWER
    assert store.winner(PROBLEM, H200.slug) == winner
    assert gpu.screened == []
    assert gpu.finalists == [[best_of(PROBLEM), some_candidates(PROBLEM)[1]]]
    assert {s.trial.phase for s in store.trials(job="j")} == {Phase.FINAL}


def test_another_winner_is_found_among_those_that_came_near(gpu: Gpu, store: Store) -> None:
    field = some_candidates(PROBLEM)
    store.add_trials([trial(candidate, 10.0) for candidate in field[1:6]])
    tuned(store, field[5])
    winner = recheck(gpu, store)
    assert winner.candidate == best_of(PROBLEM)
    assert winner.use is Use.CUTLASS
    assert (len(gpu.finalists), gpu.screened) == (1, [])


def test_a_winner_that_fails_now_starts_a_search(gpu: Gpu, store: Store) -> None:
    tuned(store, FAILS)
    winner = recheck(gpu, store, job="j")
    assert winner.candidate == best_of(PROBLEM)
    assert len(gpu.screened) > 1
    assert not winner.stale
    failed = [s.trial for s in store.trials(job="j") if s.trial.failure]
    assert {t.candidate for t in failed} == {FAILS}


def test_without_a_winner_it_is_a_search(gpu: Gpu, store: Store) -> None:
    assert recheck(gpu, store).candidate == best_of(PROBLEM)
    assert gpu.screened


def builder(folder: Path, **options: object) -> Builder:
    toolchain = fake_nvcc.toolchain(folder / "nvcc", **options)  # type: ignore[arg-type]
    return Builder(ArtifactStore(folder / "packs"), toolchain, workers=2)


def test_kernels_are_compiled_as_needed_and_one_that_does_not_compile_drops_out(
    store: Store, tmp_path: Path
) -> None:
    field = some_candidates(PROBLEM)
    tuned(store, best_of(PROBLEM), ties=(field[3].key, field[4].key))
    gpu = Compiling(tmp_path / "sweeps", PROBLEM)
    winner = recheck(gpu, store, builder=builder(tmp_path, bad=[field[3].kernel.name]))
    assert winner.candidate == best_of(PROBLEM)
    assert winner.pack is not None
    assert gpu.screened == []
    assert [t.trial.candidate for t in store.trials(phase=Phase.FINAL) if t.trial.failure] == [
        field[3]
    ]


def test_a_winner_that_does_not_compile_any_more_starts_a_search(
    store: Store, tmp_path: Path
) -> None:
    field = some_candidates(PROBLEM)
    tuned(store, field[1], ties=(field[4].key,))
    gpu = Compiling(tmp_path / "sweeps", PROBLEM)
    winner = recheck(gpu, store, builder=builder(tmp_path, bad=[field[1].kernel.name]))
    assert winner.candidate == best_of(PROBLEM)
    assert gpu.screened


def test_it_gives_way_before_the_finals(gpu: Gpu, store: Store) -> None:
    old = tuned(store, best_of(PROBLEM))
    with pytest.raises(JobAborted, match="before the finals"):
        recheck(gpu, store, should_stop=lambda: True)
    assert gpu.finalists == []
    assert store.winner(PROBLEM, H200.slug) == old


def test_on_a_real_child_process(fake_device: DeviceFactory, store: Store, tmp_path: Path) -> None:
    problem = Problem(m=128, n=128, k=128)
    kernels = {c.kernel.name: c for c in reversed(candidates(problem, MODEL))}
    slow, fast = sorted(kernels.values(), key=lambda c: -c.kernel.tile[0])[:: len(kernels) - 1]
    assert fast.kernel.tile[0] < slow.kernel.tile[0]  # which is what the child goes by
    old = replace(FAKE_ENVIRONMENT, cublas="12")
    store.promote(
        replace(winner_of(problem, device=MODEL), environment=old, candidate=slow, ties=(fast.key,))
    )
    with fake_device() as device:
        store.gpus.report(device.model, device.environment)
        winner = TuningRun(
            problem=problem,
            device=device,
            store=store,
            builder=builder(tmp_path),
            effort=Effort.RECHECK,
        ).tune()
    assert (winner.candidate, winner.environment, winner.stale) == (fast, FAKE_ENVIRONMENT, False)
    assert len(store.trials(phase=Phase.FINAL)) == 2
    assert store.trials(phase=Phase.SCREEN) == []
